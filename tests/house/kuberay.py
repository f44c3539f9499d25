"""Provides the fields of KubeRay's RayJob and RayCluster (ray.io/v1) that docker/k8s/ uses, as JSON schemas.

Kubernetes' own schemas do not have them. Each pod template is checked against Kubernetes' schema of a Pod.
"""

from __future__ import annotations

from typing import Any

_COUNT = {"type": "integer", "minimum": 0}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}


def _record(required: str, **properties: Any) -> dict[str, Any]:
    """Returns the schema of an object with exactly these fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _resource(api: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _record(
        "apiVersion kind metadata spec",
        apiVersion={"const": api},
        kind={"const": kind},
        metadata=_record("name", name={"type": "string"}, labels=_STRINGS),
        spec=spec,
    )


_TEMPLATE = _record("spec", metadata={"type": "object"}, spec={"type": "object"})
_CLUSTER = _record(
    "rayVersion headGroupSpec workerGroupSpecs authOptions",
    rayVersion={"type": "string"},
    authOptions=_record("mode", mode={"enum": ["token", "disabled"]}),
    headGroupSpec=_record("rayStartParams template", rayStartParams=_STRINGS, template=_TEMPLATE),
    workerGroupSpecs={
        "type": "array",
        "items": _record(
            "groupName replicas minReplicas maxReplicas rayStartParams template",
            groupName={"type": "string"},
            replicas=_COUNT,
            minReplicas=_COUNT,
            maxReplicas=_COUNT,
            rayStartParams=_STRINGS,
            template=_TEMPLATE,
        ),
    },
)
SCHEMAS = {
    "RayCluster": _resource("ray.io/v1", "RayCluster", _CLUSTER),
    "RayJob": _resource(
        "ray.io/v1",
        "RayJob",
        _record(
            "entrypoint rayClusterSpec",
            entrypoint={"type": "string"},
            submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
            backoffLimit=_COUNT,
            activeDeadlineSeconds={"type": "integer", "minimum": 1},
            shutdownAfterJobFinishes={"type": "boolean"},
            ttlSecondsAfterFinished=_COUNT,
            submitterConfig=_record("backoffLimit", backoffLimit=_COUNT),
            rayClusterSpec=_CLUSTER,
        ),
    ),
    # These are the resources of NVIDIA's driver for dynamic resource allocation.
    "ComputeDomain": _resource(
        "resource.nvidia.com/v1beta1",
        "ComputeDomain",
        _record(
            "numNodes channel",
            numNodes=_COUNT,
            channel=_record(
                "resourceClaimTemplate", resourceClaimTemplate=_record("name", name={"type": "string"})
            ),
        ),
    ),
}

"""The protocol's binary messages, as tables of field numbers from which protobuf builds the classes.

Only the fields that the service reads or writes are listed; protobuf skips the others. A map of the protocol is a
repeated message with a key and a value, which has the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

if TYPE_CHECKING:
    from google.protobuf.message import Message

FLOAT32, INT64, INT32 = 1, 2, 3
"""Values of a tensor's dtype."""
STOP, LENGTH = 0, 1
"""Values of a sequence's stop reason."""

_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "text": 9, "bytes": 12, "uint32": 13}
_PACKAGE = "vime_service"
_TABLES = {
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes?, 4 topk_sampled_logprobs TopkLogprobs",
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes?, 3 topk_prompt_logprobs TopkLogprobs",
    "SparseCsr": "1 values bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "RecordField": "1 key text, 2 value BatchedTensor",
    "ArrayRecord": "1 type_tag text, 2 fields RecordField*, 3 num_datums int64",
    "Metric": "1 key text, 2 value double",
    "ForwardBackwardOutput": "1 loss_fn_output_type text, 2 loss_fn_outputs ArrayRecord*, 3 metrics Metric*",
    "TextChunk": "1 tokens bytes",
    "OtherChunk": "1 content bytes",
    "Chunk": "1 encoded_text TextChunk, 2 image OtherChunk, 3 audio OtherChunk",
    "LossInput": "1 key text, 2 value Tensor",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs LossInput*",
    "LossConfigValue": "1 number double?, 2 text text?",
    "LossConfigEntry": "1 key text, 2 value LossConfigValue",
    "ForwardBackwardRequest": "1 model_id text, 2 seq_id int32, 3 data Datum*, 4 loss_fn text, 5 numbers Metric*, "
    "6 forward_only bool, 7 loss_fn_config LossConfigEntry*",
}
"""Maps a message to its fields: number, name and type. `*` is repeated, `?` is present or absent."""


def _build() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(name="vime_service.proto", package=_PACKAGE, syntax="proto3")
    for name, table in _TABLES.items():
        message = file.message_type.add(name=name)
        for entry in table.split(","):
            number, field, kind = entry.split()
            added = message.field.add(name=field, number=int(number), label=3 if kind.endswith("*") else 1)
            base = kind.rstrip("*?")
            if base in _SCALARS:
                added.type = _SCALARS[base]
            else:
                added.type, added.type_name = 11, f".{_PACKAGE}.{base}"
            if kind.endswith("?"):
                added.proto3_optional, added.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _TABLES
    }


MESSAGES = _build()

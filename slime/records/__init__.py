"""Parts of the records of `slime.types` that do not depend on a record: counts, plain values, lists that grow in
place."""

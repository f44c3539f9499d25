"""Parts of the records of `slime.types` that know no record: counts, plain values, lists that grow in place."""

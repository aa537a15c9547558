"""Weight sync from the trainer's shards to the engines.

`building` chooses the source (`source`, `peft_source`); `finite` and `tying` check its tensors, `names` and `buckets`
order them, `shards` gathers them, `transport` opens the slots, `sync` sends the buckets and `probe` verifies the first
update. `slot_updates` has what ranks and agents have in common; `serving` and `pulling` are the two ends of a pull.
"""

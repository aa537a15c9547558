"""`micro_batch_tokens`: balanced micro-batches of an optimizer step's rows. `batching` plans them, `layouts` pads,
`row_exchange` moves rows, `shares` deals them to the ranks, `microbatches` hooks into TRL, `local_metrics` keeps TRL's
metrics on the rank.
"""

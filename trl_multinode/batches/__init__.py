"""`micro_batch_tokens`: an optimizer step's rows, cut anew. `batching` plans, `layouts` shapes, `row_exchange` moves,
`microbatches` is the seam in TRL, `local_metrics` keeps its metrics on the rank.
"""

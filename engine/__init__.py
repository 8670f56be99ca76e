"""The decode loop: scheduler, batches, model, sampler. Knows requests, never Redis or a socket of the web."""

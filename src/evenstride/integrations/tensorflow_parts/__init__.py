"""Parts of tensorflow.py: addresses of workers, batches, the average, optimizers, refusals."""

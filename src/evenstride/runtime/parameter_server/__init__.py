"""Parameter servers: workers send gradients; servers step the optimizer and return the weights.

Start with `server_worker` and `server`.
"""

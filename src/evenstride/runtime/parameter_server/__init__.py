"""Parameter servers: workers send gradients, servers step the optimizer and send weights back.

Start with `server_worker` and `server`.
"""

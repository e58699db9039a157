"""Parameter servers: workers send gradients, servers step the optimizer and send weights back."""

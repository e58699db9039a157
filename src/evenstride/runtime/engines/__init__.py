"""What is specific to DDP, FSDP2, devices and compilers.

Start with `watched_models`; `model_agreement` compares a model between all ranks.
"""

"""Start, watch and reliably end the processes of ranks on this machine.

Start with `process_starters`. `rank_environment` has the environment variables of a rank. The
package does not import torch, so the lab and the tests can start processes without it.
"""

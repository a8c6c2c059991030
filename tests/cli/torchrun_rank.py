"""One rank of a pipeline, as torchrun starts it, but with PyTorch loaded.

usage: torchrun_rank.py RANK WORLD PORT ARGUMENTS of rematplan
"""

import os
import sys

from rematplan.cli import main

rank, world, port, *arguments = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
sys.exit(main(arguments))

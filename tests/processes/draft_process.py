"""A process with a draft worker and a tiny model: prints its address and serves until its standard input closes."""

import sys
import threading

import torch

from paceline.drafting.worker import DraftWorker
from paceline.wire.draft_messages import TO_DRAFT_WORKER
from paceline.wire.transport import Listener
from tests.fakes import TINY, tiny_model
from tests.processes.pools import TOKENIZER, model_core

if __name__ == "__main__":
    torch.set_num_threads(1)
    listener = Listener("tcp://127.0.0.1:0", TO_DRAFT_WORKER)
    core = model_core(tiny_model(perturb=float(sys.argv[1])))
    worker = DraftWorker("process", core, listener, TOKENIZER, TINY.vocab_size)
    print(worker.address, flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), worker.stop()), daemon=True).start()
    worker.run()

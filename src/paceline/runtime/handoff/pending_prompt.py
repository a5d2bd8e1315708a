"""One request whose prompt is computed elsewhere."""

import logging
import threading
from dataclasses import dataclass, field

from paceline.cluster.routing.kv_index import PeerHint
from paceline.core.output import OutputListener
from paceline.core.request import Request
from paceline.engine.hooks.handoff_plan import BlockPart
from paceline.engine.hooks.imports import Arrival
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.cuda_graph import staging_bytes
from paceline.runtime.transfer.client import TransferClient
from paceline.runtime.transfer.messages import TransferHandle
from paceline.runtime.transfer.transfer import TransferCancelled, TransferFailed

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PendingPrompt:
    """Not in the engine yet. `stop` ends it at any point; `reason` says why, if it was not its caller."""

    request: Request
    listener: OutputListener
    ids: tuple[int, ...]
    peer: PeerHint | None = None
    """Another target that has some of it cached."""
    stop: threading.Event = field(default_factory=threading.Event)
    reason: str = ""
    worker: str = ""
    """Who computes it; empty while that is undecided."""
    attempt: int = 0
    asked: float = 0.0
    deadline: float = 0.0
    tokens: int = 0
    """To be computed there before it is done, those of others included."""
    arrival: Arrival | None = None
    is_granted: bool = False

    @property
    def is_from_peer(self) -> bool:
        """It was not computed for this request: it is cached, there and then here."""
        return self.peer is not None and self.worker == self.peer.worker

    def fail(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.stop.set()

    def fetch(self, client: TransferClient, handle: TransferHandle, seconds: float) -> int:
        """Blocks of the prefix that are complete here afterwards: all of them, or as many as came before it was stopped or
        failed, which `reason` tells. Blocks while the prompt is computed."""
        assert self.arrival is not None
        arrival, plan = self.arrival, self.arrival.plan
        parts, places = plan.parts(), dict[int, memoryview]()
        missing = set(range(len(parts)))

        def into(index: int) -> memoryview:
            places[index] = staging_bytes(handle.sizes[index], arrival.runner.device)
            return places[index]

        def arrived(index: int) -> None:
            arrival.write(parts[index], places.pop(index))
            missing.discard(index)

        try:
            if handle.sizes != [plan.size(part) for part in parts]:
                raise TransferFailed("what is offered has another size than what was asked for")
            client.fetch(handle, range(len(parts)), into, arrived, self.stop, seconds)
        except TransferCancelled:
            pass
        except TransferFailed as error:
            self.fail(str(error))
        except Exception as error:  # whatever it is, its request must go on
            logger.exception("a prompt could not be fetched")
            self.fail(repr(error))
        if not missing:
            return plan.end
        part = parts[min(missing)]  # parts come by segment: all of those before it are there
        return part.start if isinstance(part, BlockPart) else part.stop // BLOCK_SIZE

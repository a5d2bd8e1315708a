"""What a depot said, as its takers read it."""

from paceline.runtime.transfer.errors import TransferFailed
from paceline.runtime.transfer.messages import TO_COURIER, Answer, Refused
from paceline.runtime.wire.codec import Malformed


def decode_answer(depot: str, data: memoryview) -> Answer:
    """Raises TransferFailed for a refusal, and for what is no answer."""
    try:
        answer = TO_COURIER.decode(data)
    except Malformed as malformed:
        raise TransferFailed(f"{depot} does not speak the transfer protocol: {malformed}") from None
    if isinstance(answer, Refused):
        raise TransferFailed(f"{depot}: {answer.reason}")
    return answer

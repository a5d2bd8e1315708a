"""From a configuration to the tiers of an engine's cache."""

import logging
from pathlib import Path

from paceline.core.clock import Clock
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig, OutOfMemory
from paceline.core.machine import total_memory
from paceline.engine.hooks.tiers import Tiers
from paceline.engine.memory_fit import GIB
from paceline.kv.block_tables import BlockTables, blocks_for
from paceline.kv.tiers.disk_folder import DiskFolder
from paceline.kv.tiers.store import TierStore
from paceline.models.host_blocks import HostBlocks
from paceline.models.kv_blocks import block_bytes, cache_fingerprint
from paceline.models.loading.checksums import weights_checksum
from paceline.models.runner import ModelRunner

logger = logging.getLogger(__name__)

DISK_HOST_BYTES = GIB
"""What the host tier takes where only a disk was asked for: blocks pass through it on their way. More where one sequence of
full length is more, but no more than a quarter of the machine's memory."""
LEAST_SLOTS = 16


def make_tiers(
    config: EngineConfig, runner: ModelRunner, tables: BlockTables, clock: Clock, window: int
) -> Tiers | None:
    """None where the device is the only tier. `window`: tokens of the longest sequence."""
    each, wanted = block_bytes(runner), config.kv_host_bytes
    if wanted is None and config.kv_disk is not None:
        wanted = min(max(DISK_HOST_BYTES, blocks_for(window) * each), total_memory() // 4)
    if not wanted:
        return None
    if config.tensor_parallel_size > 1:
        raise InvalidConfig(
            "kv_host_bytes and kv_disk need the whole cache in one process: leave out tensor_parallel_size"
        )
    num_slots = wanted // each
    if num_slots < LEAST_SLOTS:
        raise InvalidConfig(
            f"kv_host_bytes ({wanted}) is too little for this model: give at least {LEAST_SLOTS * each}, or 0 for none"
        )
    folder = None if config.kv_disk is None else _open_folder(config, runner, each)
    try:
        memory = HostBlocks(runner, num_slots)
    except RuntimeError as error:  # what torch raises where there is not so much memory to be had
        if folder is not None:
            folder.close()
        raise OutOfMemory(f"kv_host_bytes ({wanted}) cannot be had: {error}; set it lower") from None
    tiers = Tiers(tables, memory, TierStore(memory, clock, folder, config.kv_disk_bytes), clock)
    report = tiers.report()
    logger.info(
        "the cache has %d blocks in the host's memory%s",
        num_slots,
        "" if folder is None else f", and {report.disk_blocks} of earlier on disk in {folder.folder}",
    )
    return tiers


def _open_folder(config: EngineConfig, runner: ModelRunner, each: int) -> DiskFolder:
    assert config.kv_disk is not None
    fingerprint = cache_fingerprint(runner, weights_checksum(config.model), config.quantization)
    folder = DiskFolder(Path(config.kv_disk).expanduser(), fingerprint, each)
    if config.kv_disk_bytes < LEAST_SLOTS * folder.file_bytes:
        folder.close()
        raise InvalidConfig(
            f"kv_disk_bytes ({config.kv_disk_bytes}) is too little for this model: give at least "
            f"{LEAST_SLOTS * folder.file_bytes}"
        )
    return folder

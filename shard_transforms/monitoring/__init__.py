"""Communication reports, metrics, and checks that shards agree."""

from shard_transforms._src.monitoring.communication_report import (
    communication_report,
)
from shard_transforms._src.monitoring.compiled_report import (
    hlo_communication_report,
)
from shard_transforms._src.monitoring.digests import digest
from shard_transforms._src.monitoring.divergence import DivergenceState
from shard_transforms._src.monitoring.divergence import shard_divergence
from shard_transforms._src.monitoring.divergence import track_divergence
from shard_transforms._src.monitoring.metrics import check_health
from shard_transforms._src.monitoring.metrics import metrics
from shard_transforms._src.monitoring.report_table import Collective
from shard_transforms._src.monitoring.report_table import CommunicationReport
from shard_transforms._src.monitoring.single_device_check import (
    assert_trains_as_one_device,
)
from shard_transforms._src.monitoring.step_estimate import Chip
from shard_transforms._src.monitoring.step_estimate import StepEstimate
from shard_transforms._src.monitoring.step_estimate import estimate_step

__all__ = (
    'Chip',
    'Collective',
    'CommunicationReport',
    'DivergenceState',
    'StepEstimate',
    'assert_trains_as_one_device',
    'check_health',
    'communication_report',
    'digest',
    'estimate_step',
    'hlo_communication_report',
    'metrics',
    'shard_divergence',
    'track_divergence',
)

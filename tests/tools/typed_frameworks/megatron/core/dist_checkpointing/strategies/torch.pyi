from typing import Any

class TorchDistLoadShardedStrategy:
    load: Any

class TorchDistSaveShardedStrategy: ...

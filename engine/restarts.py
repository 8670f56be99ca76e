"""How often an engine process that dies is started again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class RestartBudget:
    """How soon a dead engine is started again, and when it is given up.

    A restart waits `first_delay_s`, twice as long after each further one within `window_s`, and the engine
    stays down after `limit` of them: something that dies that often needs a person.
    """

    limit: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.5
    _starts: deque[float] = field(default_factory=deque)

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the next restart, counting it; None if there shall be none."""
        while self._starts and self._starts[0] <= now - self.window_s:
            self._starts.popleft()
        if len(self._starts) >= self.limit:
            return None
        self._starts.append(now)
        return float(self.first_delay_s * 2 ** (len(self._starts) - 1))

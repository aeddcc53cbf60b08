import io
import re
import time

from megatron_ext.monitoring.progress import Progress
from tests.monitoring.records import step_record


def _record(step: int, **changes):
    return step_record(step, lm_loss=3.14159, window=1024, tokens_per_s=8192.4, **changes)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_of_a_terminal_shows_step_loss_window_speed_and_time_left():
    stream = Terminal()
    progress = Progress(2000, 1000, stream=stream)
    time.sleep(0.15)  # tqdm draws at most every 0.1 s
    progress.update(_record(1000))
    progress.close()
    text = stream.getvalue()
    assert "step 1,001/2,000" in text
    assert "loss 3.1416 | norm 0.5 | lr 4.0e-04 | window 1,024 | 8,192 tokens/s" in text
    assert re.search(r"\[\d\d:\d\d < \d+:\d\d\]", text)


def test_which_steps_get_a_line(monkeypatch):
    """The first, the last and every tenth; of slow ones one each time the seconds are over."""
    stream = io.StringIO()
    progress = Progress(25, 0, stream=stream)
    for step in range(25):
        progress.update(_record(step))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(" |")[0] for line in lines] == ["step 1/25", "step 11/25", "step 21/25", "step 25/25"]
    figures = r"loss 3\.1416 \| norm \S+ \| lr 4\.0e-04 \| window 1,024 \| 8,192 tokens/s"
    assert re.fullmatch(rf"step 25/25 \| {figures} \| 00:00 left", lines[-1])
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    progress = Progress(100, 0, stream=stream, every_steps=1000)
    for step, pause in enumerate((0.0, 0.0, 10.0, 0.0)):
        now += pause
        progress.update(_record(step))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/100", "3/100"]

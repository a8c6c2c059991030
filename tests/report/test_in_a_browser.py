"""A browser draws the report without errors or requests, tells about an op under the pointer, and follows the theme."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rematplan.ir import Op, Tensor, TrainingGraph
from rematplan.plan_report.page import Subject, page
from rematplan.planner.core.plan import plan_from_runs

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
PROBE = """<script>
const errors = [];
addEventListener("error", event => errors.push(event.message));
addEventListener("load", () => {
  const memory = document.getElementById("memory");
  const at = memory.data.findIndex(row => row.name === "the plan");
  Plotly.Fx.hover(memory, [{curveNumber: at, pointNumber: 0}]);
  const seen = {
    errors, resources: performance.getEntriesByType("resource").map(one => one.name), milliseconds: performance.now(),
    plots: [...document.querySelectorAll(".plot")].map(plot => plot.querySelectorAll("svg.main-svg").length > 0),
    hover: [...memory.querySelectorAll(".hovertext")].map(one => one.textContent).join(),
    background: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(memory.querySelector(".xtitle")).fill,
  };
  document.body.append(Object.assign(document.createElement("pre"), {id: "seen", textContent: JSON.stringify(seen)}));
});
</script>"""
LAYERS = 5000
"""Two ops each: the page must open in a few seconds."""


def chain(layers: int) -> Subject:
    """The plan of a chain of layers: the first runs again."""
    tensors = [Tensor("x", 1 << 20), Tensor("g0", 1 << 20)]
    forward, backward = [], []
    for k in range(layers):
        tensors += [Tensor(f"a{k}", 1 << 20), Tensor(f"g{k + 1}", 1 << 20)]
        forward.append(Op(f"tanh_{k}", (f"a{k - 1}" if k else "x",), (f"a{k}",), 10.0, 0, "forward"))
        backward.insert(0, Op(f"back_{k}", (f"a{k}", f"g{k + 1}"), (f"g{k}",), 20.0, 0, "backward"))
    loss = Op("loss", (f"a{layers - 1}",), (f"g{layers}",), 1.0, 0, "backward")
    ops = (*forward, loss, *backward)
    graph = TrainingGraph("chain", tuple(tensors), ("x",), ("g0",), ops, fixed_split={"batch": 1 << 20})
    names = [op.name for op in ops]
    plan = plan_from_runs(graph, [*names[:-1], "tanh_0", names[-1]], "by_hand")
    return Subject(graph, plan, {op.name: f"layers.{op.name.split('_')[-1]}" for op in (*forward, *backward)})


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed")
@pytest.mark.parametrize(("dark", "layers"), [(False, 8), (True, LAYERS)])
def test_a_browser_draws_the_page(dark: bool, layers: int, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    seen = opened(page(chain(layers)).replace("<body>", f"<body>{PROBE}", 1), dark, tmp_path)
    assert seen["errors"] == seen["resources"] == []
    assert seen["plots"] == [True, True, True]
    assert re.match(
        "tanh_0layers.0.*read by tanh_1, back_0freed after tanh_1computed again at", seen["hover"]
    )
    assert seen["background"] == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    assert seen["ink"] == ("rgb(230, 233, 239)" if dark else "rgb(29, 36, 48)")
    assert seen["milliseconds"] < 30_000  # 2,200 where nothing else runs


def opened(text: str, dark: bool, folder: Path) -> dict[str, Any]:
    """Open a page in a browser without a network, and return what the probe saw."""
    (folder / "report.html").write_text(text)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--enable-logging=stderr"]
    options += [f"--user-data-dir={folder}/profile", "--host-resolver-rules=MAP * ~NOTFOUND"]
    options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"file://{folder}/report.html"]
    assert BROWSER is not None
    done = subprocess.run([BROWSER, *options], capture_output=True, text=True, timeout=120, check=True)
    assert ":CONSOLE" not in done.stderr
    found = re.search('<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    return dict(json.loads(html.unescape(found[1])))

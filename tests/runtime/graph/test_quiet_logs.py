"""An op that does not fit is one line: torch's own log of the traceback stays silent."""

import pytest
import torch
from torch import nn

from rematplan.ir import ModelError
from rematplan.runtime.capture.with_loss import with_loss


def test_no_traceback_is_logged(capfd):
    with pytest.raises(ModelError, match="does not run on inputs of shapes"):
        with_loss(nn.Linear(3, 4), (torch.randn(2, 5),))
    assert "Traceback" not in capfd.readouterr().err

"""A model on a GPU trains like one on the CPU. Its transfers go through pinned buffers on the host."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import paceline
from train.jobs import job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
F = torch.nn.functional


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 1)


def model() -> Any:
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    return torch.nn.Sequential(*layers)


def train(net: Any, optimizer: Any, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        x, y = torch.randn(12, 6, generator=generator), torch.randint(0, 3, (12,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(net(x.to(device)), y.to(device)).backward()
        optimizer.step()


@pytest.mark.parametrize(("gradients", "rtol", "atol"), [("float32", 1e-3, 1e-4), ("bfloat16", 0.05, 0.01)])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_on_a_gpu_trains_like_one_on_the_cpu(overlap: bool, gradients: str, rtol: float, atol: float) -> None:
    theirs, ours = model(), model().cuda()
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), "cpu")
    with job("r2sp" if overlap else "bsp:weights=mean", streamed=overlap) as running:
        inner = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
        with paceline.join(ours, inner, connect=running.address, gradients=gradients, overlap=overlap) as session:
            session.optimizer.batch_size = 12
            train(ours, session.optimizer, "cuda")
    assert all(parameter.is_cuda for parameter in ours.parameters())
    for name, expected in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name].cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("fused", [False, True])
def test_mixed_precision_on_a_gpu(fused: bool) -> None:
    net = model().cuda()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    x, y = torch.randn(12, 6).cuda(), torch.randint(0, 3, (12,)).cuda()
    losses = []
    with job("asp") as running:
        inner = torch.optim.AdamW(net.parameters(), lr=0.05, fused=fused)
        with paceline.join(net, inner, connect=running.address) as session:
            for _ in range(60):
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = F.cross_entropy(net(x), y)
                scaler.scale(loss).backward()
                session.step(loss, scaler=scaler)
                losses.append(loss.item())
    assert scaler.get_scale() < 2.0**40 and losses[-1] < losses[0] / 2

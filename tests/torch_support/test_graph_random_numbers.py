"""Random numbers of captured steps: those that the step would have drawn as it is."""

import threading

import torch
from torch import nn

from bondgrad import GraphedStep
from bondgrad.reservoirs import Noisy
from tests.helpers import needs_cuda


@needs_cuda
def test_the_first_replay_has_the_random_numbers_of_its_step_on_a_busy_gpu():
    """Two streams set the place where a graph finds its random numbers: that of the capture and that of the replay."""
    busy, stop = torch.randn(4096, 4096, device="cuda"), threading.Event()

    def occupy():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                for _ in range(4):
                    busy @ busy
                torch.cuda.current_stream().synchronize()

    # Torch has 32 streams and gives them out in turn: with new ones for every seed, a capture would come to be on the
    # stream of the thread above.
    around = torch.cuda.Stream()

    def noisy_losses(seed, graphed):
        torch.manual_seed(seed)
        reservoir = Noisy(nn.Linear(4, 4), 1e-3, seed=seed).cuda()
        step = lambda x: reservoir(x).sum()  # noqa: E731
        take = GraphedStep(step, reservoir) if graphed else step
        with torch.cuda.stream(around), torch.no_grad():
            losses = [take(x) for x in torch.ones(6, 64, 4, device="cuda")]
            torch.cuda.synchronize()
        return torch.stack(losses).tolist()

    thread = threading.Thread(target=occupy)
    thread.start()
    try:
        for seed in range(20):  # each takes a stream
            assert noisy_losses(seed, True) == noisy_losses(seed, False)
    finally:
        stop.set()
        thread.join()

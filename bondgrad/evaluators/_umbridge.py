"""Evaluation by a model server that speaks the UM-Bridge protocol."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from bondgrad.evaluators._remote import needed
from bondgrad.evaluators._threads import Threads


class UMBridge(Threads):
    """Evaluates rows by model servers over HTTP, one row per request: simulations in any language, in containers.

    A row has the inputs of the model one after the other, if it has several vectors of them; outputs likewise. A server
    that is down or that raises an error costs the rows that it was asked for, which are asked again.

    Args:
        url: The address of a server or of a load balancer, or a list of several servers with the same model.
        model: The name of the model.
        parallel: How many rows are asked for at a time. With several servers they take turns.
        config: Passed to the model with each row. None: nothing.
        timeout: Seconds that one row may take; None: any time. A request that exceeds it is left to itself, and its
            late answer is dropped; with more than `parallel` such requests, `BoxError` is raised.
        retries: How often a row is asked again for which no finite output came; None: as often as it takes.
        rate: The most evaluations in a second; None: no limit.
        max_evaluations: The most evaluations of one layer; None: no limit.

    Example:
        >>> evaluator = UMBridge("http://localhost:4242", "forward", parallel=4)  # doctest: +SKIP
        >>> box = bondgrad.BlackBox(None, in_features=3, evaluator=evaluator)  # doctest: +SKIP

    References:
        Seelinger et al., UM-Bridge: Uncertainty quantification and modeling bridge, JOSS 8 (2023) 4748.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        model: str,
        *,
        parallel: int = 1,
        config: dict[str, Any] | None = None,
        timeout: float | None = None,
        retries: int | None = 2,
        rate: float | None = None,
        max_evaluations: int | None = None,
    ) -> None:
        urls = [url] if isinstance(url, str) else list(url) if isinstance(url, Sequence) else []
        if not urls or not all(isinstance(one, str) for one in urls):
            raise ValueError(f"url must be an address, such as 'http://localhost:4242', or a list of some, got {url!r}")
        self.url, self.model, self.parallel, self.config = url, model, parallel, config
        needed("umbridge", "umbridge")
        options: Any = {"retries": retries, "rate": rate, "max_evaluations": max_evaluations}
        factory = functools.partial(_connected, urls, model, config or {})
        super().__init__(parallel, factory, max_rows=1, timeout=timeout, **options)

    def __repr__(self) -> str:
        return f"UMBridge({self.url!r}, {self.model!r}, parallel={self.n}, timeout={self.timeout})"

    start_advice = ". Start the server, or correct url= and model=."
    hang_advice = "Restart the server, or give a longer timeout="


class ModelBox:
    """A box that asks a model server.

    Args:
        url: The address of the server.
        model: The name of the model.
        config: Passed to the model with each row.
    """

    def __init__(self, url: str, model: str, config: dict[str, Any]) -> None:
        self.__name__ = model
        self._url, self._config = url, config
        self._model = needed("umbridge", "umbridge").HTTPModel(url, model)
        self._sizes: list[int] = self._model.get_input_sizes(config)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The outputs [N, d_out] at the rows of x [N, d]."""
        if x.shape[1] != sum(self._sizes):
            raise TypeError(
                f"the model {self.__name__} at {self._url} takes {sum(self._sizes)} inputs (vectors of {self._sizes}), "
                f"got {x.shape[1]}: make the layer with in_features={sum(self._sizes)}"
            )
        return np.array([self._outputs(row) for row in x.tolist()])

    def _outputs(self, row: list[float]) -> list[float]:
        ends = list(itertools.accumulate(self._sizes))
        vectors = [row[end - size : end] for size, end in zip(self._sizes, ends, strict=True)]
        try:
            outputs = self._model(vectors, self._config)
        except ValueError as error:
            raise RuntimeError(
                f"the server at {self._url} did not answer in JSON, as when the model raises an error: see its log"
            ) from error
        return [value for vector in outputs for value in vector]


def _connected(urls: list[str], model: str, config: dict[str, Any], number: int) -> ModelBox:
    """The box of the worker with this number."""
    return ModelBox(urls[number % len(urls)], model, config)

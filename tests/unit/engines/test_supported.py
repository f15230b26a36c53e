"""What is refused of vLLM by name, before memory is taken."""

import warnings
from types import SimpleNamespace

import pytest

from kvtide.errors import UnsupportedError

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvtide.engines.vllm import supported

# vLLM's modules warn as they load, and some load inside of the tests.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

WORKER = "kvtide.engines.vllm.worker.ElasticCPUWorker"


def config(**parallel):
    """What `check` sees of a configuration with nothing in it that is refused."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{"worker_cls": WORKER, "data_parallel_size": 1, "tensor_parallel_size": 2} | parallel
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        kv_transfer_config=None,
        model_config=SimpleNamespace(enable_sleep_mode=False, is_diffusion=False, model="m"),
    )


def test_a_plain_configuration_is_supported():
    supported.check(config(), {WORKER})


def test_data_parallelism_is_refused_with_what_to_do_instead():
    with pytest.raises(UnsupportedError) as refused:
        supported.check(config(data_parallel_size=4), {WORKER})
    said = str(refused.value)
    assert "data parallelism (--data-parallel-size 4) is not supported" in said
    assert "start one server for each replica, or with KVTIDE=0" in said


def test_a_model_that_generates_by_diffusion_is_refused():
    diffuses = config()
    diffuses.model_config.is_diffusion = True
    with pytest.raises(UnsupportedError, match="the model m generates by discrete diffusion"):
        supported.check(diffuses, {WORKER})

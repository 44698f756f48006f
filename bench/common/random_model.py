"""A model of a given shape with random weights, for benchmarks and tests."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lightkv.router.model.model_config import check_supported


def random_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Makes a model of `config`'s shape with random weights on `device`.

    Matrices are normal with standard deviation 1/sqrt(fan-in), so that activations keep their size; biases
    are zero and norms are one; buffers (the rotary frequencies) are those of a real model. The weights are the
    same after the same `torch.manual_seed`.
    """
    from accelerate import init_empty_weights

    check_supported(config)
    with init_empty_weights(
        include_buffers=False
    ):  # parameters take no memory yet; buffers are made for real
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    made: dict[
        int, torch.nn.Parameter
    ] = {}  # by the id of the parameter replaced, so that tied ones stay tied
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                if data.dim() >= 2:
                    data.normal_(std=data.shape[-1] ** -0.5)
                else:
                    data.fill_(0.0 if name.endswith("bias") else 1.0)
                made[id(parameter)] = torch.nn.Parameter(data, requires_grad=False)
            setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return model.eval()

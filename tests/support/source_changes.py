# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Changes of Transformers' source as a release may bring: of form, and of substance."""

from typing import NamedTuple


class Change(NamedTuple):
    place: tuple[str, str, str]  # model, class, and "forward" or a function of the module
    old: str
    new: str
    is_form: bool
    what: str

    @property
    def model_type(self) -> str:
        """That has the class."""
        model, *_ = self.place
        return "qwen3_5_text" if model == "qwen3_5" else model


def changes(model: str, name: str, rows: dict[bool, list[tuple[str, str, str, str]]]):
    """Of one class: whether they are of form -> where, old, new, what."""
    for is_form, of_kind in rows.items():
        for where, old, new, what in of_kind:
            yield Change((model, name, where), old, new, is_form, what)


CHUNKS, STEPS = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
MASKED = "hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)"
DECAY = "F.softplus(a.float() + self.dt_bias)"
BETA = "beta = b.sigmoid()"
MASK = "attention_mask: torch.Tensor | None = None,"
FORM, SUBSTANCE = True, False

CHANGES = [
    *changes(
        "qwen3_5",
        "Qwen3_5GatedDeltaNet",
        {
            FORM: [
                (CHUNKS, "query = query * scaling", "query = scaling * query", "factors turned"),
                (CHUNKS, "cum_decay", "summed", "a name of the delta rule's"),
                (
                    STEPS,
                    "query = query / (query.shape[-1] ** 0.5)",
                    "query = query * (query.shape[-1] ** -0.5)",
                    "a division as a product",
                ),
                ("forward", "b.sigmoid()", "torch.sigmoid(b)", "a method as a function"),
                (
                    "forward",
                    MASKED,
                    "hidden_states = hidden_states if attention_mask is None or "
                    "attention_mask.shape[1] == 1 else (hidden_states * "
                    "attention_mask[:, -hidden_states.shape[1]:, None]).to(hidden_states.dtype)",
                    "masking in line",
                ),
                (
                    "l2norm",
                    "inv_norm = torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)",
                    "inv_norm = 1 / torch.sqrt(x.square().sum(dim, keepdim=True) + eps)",
                    "a root and its inverse",
                ),
                (
                    "forward",
                    "core_attn_out = self.norm(core_attn_out, z)",
                    "core_attn_out = self.norm(core_attn_out.float(), z.float())"
                    ".to(hidden_states.dtype)",
                    "a norm in float32",
                ),
            ],
            SUBSTANCE: [
                (CHUNKS, "eps=1e-6", "eps=1e-4", "another epsilon in prompts"),
                ("l2norm", "+ eps)", "+ 10 * eps)", "another epsilon everywhere"),
                (STEPS, "query = query / (query.shape[-1] ** 0.5)", "pass", "no scale of steps"),
                ("forward", BETA, "beta = 2 * b.sigmoid()", "write strengths up to 2"),
                (
                    CHUNKS,
                    "last_recurrent_state = last_recurrent_state * chunk_decay[:, :, i] + ",
                    "last_recurrent_state = last_recurrent_state * chunk_decay[:, :, i].sqrt() + ",
                    "another decay between chunks of 64",
                ),
                (
                    "forward",
                    DECAY,
                    "F.softplus(a.float() + self.dt_bias, threshold=5.0)",
                    "a softplus that is linear from 5 on",
                ),
                ("forward", DECAY, f"{DECAY}.clamp(max=8)", "steps up to 8"),
                ("forward", MASKED, "pass", "no mask"),
                (
                    "forward",
                    "cache.update_recurrent_state(last_recurrent_state, self.layer_idx)",
                    "pass",
                    "no state",
                ),
                (
                    "forward",
                    "mixed_qkv = mixed_qkv[:, :, -seq_len:]",
                    "mixed_qkv = mixed_qkv[:, :, :seq_len]",
                    "the other end of a convolution",
                ),
                (
                    "forward",
                    "self.A_log.float().exp()",
                    "(self.A_log.float().exp() if not self.training else "
                    "1.001 * self.A_log.float().exp())",
                    "0.1 % in training",
                ),
                (
                    "forward",
                    "query = query.reshape(batch_size, seq_len, -1, self.head_k_dim)",
                    "query = query.reshape(batch_size, seq_len, -1, self.head_k_dim)"
                    " * (0.5 if seq_len > 4096 else 1)",
                    "something beyond 4,096 tokens",
                ),
                (
                    "forward",
                    BETA,
                    "beta = b.sigmoid() * getattr(self, 'beta_scale', 1.0)",
                    "a new attribute",
                ),
                ("forward", MASK, f"{MASK} gate_scale: float = 1.0,", "a new argument"),
                (
                    "forward",
                    f"cache: Cache | None = None,\n    {MASK}",
                    f"{MASK}\n    cache: Cache | None = None,",
                    "arguments in another order",
                ),
            ],
        },
    ),
    *changes(
        "mamba2",
        "Mamba2Mixer",
        {
            FORM: [
                (
                    "mamba2_chunk_scan",
                    "dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])",
                    "dt = dt.clamp(*dt_limit)",
                    "a clamp as a method",
                ),
                ("mamba2_chunk_scan", "A_cumsum", "cum", "a name of the state space's"),
                (
                    "mamba2_chunk_scan",
                    'G = torch.einsum("bclhn,bcshn->bclsh", C, B)',
                    'G = torch.einsum("bcshn,bclhn->bclsh", B, C)',
                    "an einsum turned",
                ),
            ],
            SUBSTANCE: [
                (
                    "mamba2_chunk_scan",
                    "B.float().repeat_interleave(num_heads // num_groups, dim=2, "
                    "output_size=num_heads)",
                    "B.float().repeat(1, 1, num_heads // num_groups, 1)",
                    "other groups of heads",
                ),
                (
                    "mamba2_chunk_scan",
                    "dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])",
                    "dt = torch.clamp(dt, min=dt_limit[0], max=min(20.0, dt_limit[1]))",
                    "steps up to 20",
                ),
                (
                    "mamba2_chunk_scan",
                    "output = output + D_residual",
                    "output = output",
                    "nothing past the state",
                ),
                (
                    "mamba2_chunk_scan",
                    "decay_chunk = torch.exp(",
                    "decay_chunk = 0.999 * torch.exp(",
                    "0.1 % between chunks",
                ),
                (
                    "forward",
                    "hidden_states_B_C = "
                    "apply_mask_to_padding_states(hidden_states_B_C.transpose(1, 2), "
                    "attention_mask)",
                    "hidden_states_B_C = hidden_states_B_C.transpose(1, 2)",
                    "no mask behind the convolution",
                ),
                (
                    "forward",
                    "dt_limit=self.time_step_limit",
                    "dt_limit=(0.0, float('inf'))",
                    "a limit of the config that is not read",
                ),
            ],
        },
    ),
    *changes(
        "lfm2",
        "Lfm2ShortConv",
        {
            FORM: [("forward", "y = C * hidden_states", "y = hidden_states * C", "gates turned")],
            SUBSTANCE: [
                (
                    "forward",
                    "B, C, x = BCx.chunk(3, dim=-2)",
                    "C, B, x = BCx.chunk(3, dim=-2)",
                    "the other gate",
                ),
                (
                    "forward",
                    "y = C * hidden_states",
                    "y = C * torch.nn.functional.silu(hidden_states)",
                    "an activation",
                ),
                (
                    "forward",
                    "y = C * hidden_states",
                    "y = C * (hidden_states if seq_len > 1 else 1.01 * hidden_states)",
                    "1 % of single tokens",
                ),
            ],
        },
    ),
    *changes(
        "mamba",
        "MambaMixer",
        {
            FORM: [
                ("mamba_selective_scan", "scan_outputs", "outs", "a name of the scan's"),
                (
                    "mamba_selective_scan",
                    "scan_output = scan_output + hidden_states * D[None, :, None]",
                    "scan_output = torch.addcmul(scan_output, hidden_states, "
                    "D[None, :, None].to(scan_output))",
                    "a sum and a product at once",
                ),
            ],
            SUBSTANCE: [
                (
                    "mamba_selective_scan",
                    "deltaB_u = discrete_B * hidden_states[:, :, :, None].float()",
                    "deltaB_u = (discrete_A - 1) / A[None, :, None, :] * B[:, None, :, :].float() "
                    "* hidden_states[:, :, :, None].float()",
                    "a zero-order hold",
                ),
                (
                    "mamba_selective_scan",
                    "dt = F.softplus(dt)",
                    "dt = F.softplus(dt) + 1e-4",
                    "a least step",
                ),
            ],
        },
    ),
    *changes(
        "kimi_linear",
        "KimiLinearDeltaAttention",
        {
            SUBSTANCE: [
                (
                    "forward",
                    "beta = torch.sigmoid(self.b_proj(hidden_states))",
                    "beta = torch.sigmoid(self.b_proj(hidden_states)).clamp(max=0.98)",
                    "write strengths up to 0.98",
                )
            ]
        },
    ),
    *changes(
        "minimax",
        "MiniMaxLightningAttention",
        {
            SUBSTANCE: [
                (
                    "forward",
                    "attn_output = self.norm(attn_output)",
                    "attn_output = self.norm(attn_output) * 1.0005",
                    "0.05 %",
                )
            ]
        },
    ),
    *changes(
        "recurrent_gemma",
        "RecurrentGemmaRglru",
        {
            FORM: [
                (
                    "forward",
                    "gated_inputs = activations * input_gate",
                    "gated_inputs = input_gate * activations",
                    "factors of an RG-LRU turned",
                ),
            ],
            SUBSTANCE: [
                ("forward", "1 - a_square", "1 - recurrent_gate", "an RG-LRU's scale"),
                ("forward", "[:, :, None] == 0", "[:, :, None] == 1", "where an RG-LRU begins"),
            ],
        },
    ),
    *changes(
        "recurrent_gemma",
        "RecurrentGemmaRecurrentBlock",
        {
            SUBSTANCE: [
                (
                    "forward",
                    "conv_state[:, :, 1:]",
                    "conv_state[:, :, :-1]",
                    "what an RG-LRU's convolution keeps",
                ),
            ],
        },
    ),
    *changes(
        "xlstm",
        "xLSTMLayer",
        {
            FORM: [
                (
                    "forward",
                    "self.ogate_act_fn(o_preact) * h_norm",
                    "h_norm * self.ogate_act_fn(o_preact)",
                    "factors of a matrix memory turned",
                ),
            ],
            SUBSTANCE: [
                (
                    "mlstm_recurrent_step_native",
                    "torch.exp(igate - scaM_state_new)",
                    "torch.exp(igate - scaM_state_new + 0.001)",
                    "a matrix memory's write strengths",
                ),
                ("soft_cap", "values / cap_value)", "0.99 * values / cap_value)", "a soft cap"),
            ],
        },
    ),
    *changes(
        "zaya",
        "ZayaCCAProjection",
        {
            FORM: [
                (
                    "forward",
                    "(query_residual + key_residual) * 0.5",
                    "0.5 * (query_residual + key_residual)",
                    "factors of compressed queries turned",
                ),
            ],
            SUBSTANCE: [
                ("forward", "delayed_v_state[:, :-1]", "delayed_v_state[:, 1:]", "delayed values"),
            ],
        },
    ),
    *changes(
        "rwkv",
        "RwkvSelfAttention",
        {
            FORM: [
                (
                    "rwkv_linear_attention_cpu",
                    "e1 * num_state + e2 * current_value",
                    "e2 * current_value + e1 * num_state",
                    "sums of WKV turned",
                ),
            ],
            SUBSTANCE: [
                (
                    "rwkv_linear_attention_cpu",
                    "current_key + time_first - max_for_output",
                    "current_key + 1.01 * time_first - max_for_output",
                    "WKV's weight of the present token",
                ),
            ],
        },
    ),
    *changes(
        "rwkv",
        "RwkvFeedForward",
        {
            SUBSTANCE: [
                (
                    "forward",
                    "torch.square(torch.relu(self.key(key)))",
                    "torch.relu(self.key(key))",
                    "a square behind a token shift",
                ),
            ],
        },
    ),
]

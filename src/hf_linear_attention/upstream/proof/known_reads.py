# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The values that known sources of Transformers' recurrent layers read, by our class that replaces
them. Made by scripts/note_known_reads.py, for one release of Transformers after the other.
"""

from typing import NamedTuple


class Known(NamedTuple):
    """Names that all known sources read, and names and numbers that some do."""

    always: str
    sometimes: str
    numbers: tuple[float, ...]

    @property
    def always_read(self) -> set[str]:
        return set(self.always.split())

    @property
    def names(self) -> set[str]:
        return self.always_read | set(self.sometimes.split())


KNOWN: dict[str, Known] = {
    "CompressedProjection": Known(
        "self.conv_kernel_size self.conv_qk_depthwise self.conv_qk_grouped self.head_dim "
        "self.hidden_size self.k_proj self.layer_idx self.num_key_value_groups self.q_proj "
        "self.v_proj_current self.v_proj_delayed ",
        "",
        (0.5,),
    ),
    "ConvolutionOfTokens": Known(
        "self.conv_idx self.conv_kernel_size self.layer_idx self.num_heads self.static_weight "
        "self.weight_proj ",
        "kwargs.seq_idx ",
        (),
    ),
    "EarlierScaledConvolution": Known(
        "kwargs.seq_idx self.conv1d self.conv_idx self.conv_kernel_size self.layer_idx ",
        "",
        (),
    ),
    "GatedConvolution": Known(
        "self.conv self.conv_kernel_size self.in_proj self.layer_idx self.out_proj ",
        "",
        (),
    ),
    "GatedDelta": Known(
        "kwargs.cu_seq_lens_q self.A_log self.activation self.conv1d self.conv_kernel_size "
        "self.dt_bias self.head_k_dim self.head_v_dim self.in_proj_a self.in_proj_b "
        "self.in_proj_qkv self.in_proj_z self.key_dim self.layer_idx self.norm self.out_proj "
        "self.value_dim ",
        "self.num_k_heads self.num_v_heads ",
        (1e-06, 0.5, 64.0),
    ),
    "GatedDeltaOfOlmo": Known(
        "kwargs.cu_seq_lens_q self.A_log self.a_proj self.activation self.allow_neg_eigval "
        "self.b_proj self.conv1d self.conv_kernel_size self.dt_bias self.g_proj "
        "self.head_k_dim self.head_v_dim self.k_proj self.key_dim self.layer_idx self.o_norm "
        "self.o_proj self.q_proj self.v_proj self.value_dim ",
        "self.num_k_heads self.num_v_heads ",
        (1e-06, 0.5, 2.0, 64.0),
    ),
    "GatedDeltaOfQwen3Next": Known(
        "kwargs.cu_seq_lens_q self.A_log self.activation self.conv1d self.conv_kernel_size "
        "self.dt_bias self.fix_query_key_value_ordering self.head_k_dim self.head_v_dim "
        "self.in_proj_ba self.in_proj_qkvz self.key_dim self.layer_idx self.norm "
        "self.num_k_heads self.num_v_heads self.out_proj self.value_dim ",
        "",
        (1e-06, 0.5, 64.0),
    ),
    "GatedShift": Known(
        "self.key self.layer_id self.receptance self.time_mix_key self.time_mix_receptance "
        "self.time_shift self.value ",
        "",
        (),
    ),
    "GatedUnit": Known(
        "self._rnn_scan self.block_width self.input_gate_bias self.input_gate_weight "
        "self.num_attention_heads self.recurrent_gate_bias self.recurrent_gate_weight "
        "self.recurrent_param self.recurrent_states ",
        "",
        (8.0,),
    ),
    "KDA": Known(
        "self.activation self.b_proj self.conv1d self.conv_kernel_size self.forget_gate "
        "self.g_a_proj self.g_b_proj self.head_dim self.k_proj self.layer_idx self.o_norm "
        "self.o_proj self.q_proj self.qkv_dim self.v_proj ",
        "",
        (1e-06, 0.5, 64.0),
    ),
    "KDAOfBailing": Known(
        "self.activation self.b_proj self.conv1d self.conv_kernel_size self.forget_gate "
        "self.g_proj self.head_dim self.k_proj self.layer_idx self.o_norm self.o_proj "
        "self.q_proj self.qkv_dim self.v_proj ",
        "",
        (1e-06, 0.5, 64.0),
    ),
    "Lightning": Known(
        "self.act_fn self.block_size self.diagonal_decay self.head_dim self.key_decay "
        "self.layer_idx self.layers self.linear_cache self.norm self.num_attention_heads "
        "self.out_proj self.output_gate self.qkv_proj self.query_decay self.slope_rate ",
        "",
        (),
    ),
    "Mamba1": Known(
        "self.A_log self.D self.activation self.conv1d self.conv_kernel_size self.dt_proj "
        "self.in_proj self.layer_idx self.out_proj self.ssm_state_size self.time_step_rank "
        "self.training self.use_associative_scan self.use_bias self.use_conv_bias "
        "self.use_mambapy self.x_proj ",
        "",
        (1e-06,),
    ),
    "Mamba1OfZamba": Known(
        "kwargs.seq_idx self.A_log self.D self.activation self.conv1d self.conv_kernel_size "
        "self.dt_proj_bias self.dt_proj_weight self.in_proj self.layer_idx "
        "self.mamba_head_dim self.n_mamba_heads self.out_proj self.ssm_state_size "
        "self.time_step_rank self.x_proj_weight ",
        "self.use_associative_scan ",
        (),
    ),
    "Mamba1WithNorms": Known(
        "kwargs._is_quantized self.A_log self.D self.activation self.b_layernorm "
        "self.c_layernorm self.config self.conv1d self.conv_kernel_size self.dt_layernorm "
        "self.dt_proj self.in_proj self.layer_idx self.out_proj self.ssm_state_size "
        "self.time_step_rank self.use_associative_scan self.use_mambapy self.x_proj ",
        "self.rms_eps self.training self.use_bias self.use_conv_bias ",
        (1e-06,),
    ),
    "MatrixMemoryLayer": Known(
        "config.autocast_kernel_dtype config.chunk_size config.eps config.gate_soft_cap "
        "config.inference_state_dtype config.mode config.num_heads config.return_last_states "
        "config.weight_mode self._inference_fn self._train_fn self.chunkwise_kernel_fn "
        "self.config self.fgate_preact self.ifgate_preact self.igate_preact self.k "
        "self.mlstm_backend self.multihead_norm self.ogate_act_fn self.ogate_preact "
        "self.out_proj self.q self.qk_dim self.qkv_opreact self.sequence_kernel_fn "
        "self.step_kernel_fn self.v self.v_dim ",
        "",
        (1e-06, 0.5, 64.0),
    ),
    "RecurrentBlock": Known(
        "self.act_fn self.conv1d_state self.conv1d_width self.conv_1d self.hidden_size "
        "self.linear_out self.linear_x self.linear_y self.lru_width self.rg_lru ",
        "",
        (),
    ),
    "ResidualConvolution": Known(
        "kwargs.seq_idx self.conv1d self.conv_idx self.conv_kernel_size self.layer_idx ",
        "",
        (),
    ),
    "SSD": Known(
        "self.A_log self.D self.activation self.chunk_size self.conv1d self.conv_dim "
        "self.conv_kernel_size self.dt_bias self.head_dim self.in_proj self.intermediate_size "
        "self.layer_idx self.n_groups self.norm self.num_heads self.out_proj "
        "self.ssm_state_size self.time_step_limit self.training ",
        "",
        (1e-06,),
    ),
    "SSDOfFalcon": Known(
        "self.A_log self.D self.activation self.chunk_size self.conv1d self.conv_dim "
        "self.conv_kernel_size self.dt_bias self.head_dim self.in_proj self.intermediate_size "
        "self.layer_idx self.mamba_rms_norm self.mup_vector self.n_groups self.norm "
        "self.num_heads self.out_proj self.ssm_in_multiplier self.ssm_state_size "
        "self.time_step_limit self.training ",
        "",
        (1e-06,),
    ),
    "ScaledConvolution": Known(
        "kwargs.seq_idx self.conv1d self.conv_idx self.conv_kernel_size self.layer_idx ",
        "",
        (),
    ),
    "WKV": Known(
        "self.extract_key_value self.key self.layer_id self.output self.receptance "
        "self.time_decay self.time_first self.time_mix_key self.time_mix_receptance "
        "self.time_mix_value self.time_shift self.value ",
        "",
        (1e38,),
    ),
}

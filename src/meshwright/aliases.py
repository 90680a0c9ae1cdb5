"""Names from other trainers, and the names that errors suggest in their place."""

from meshwright.words import AXIS_ALIASES


def _inverted(table: dict[str, str]) -> dict[str, str]:
    return {elsewhere: ours for ours, names in table.items() for elsewhere in names.split()}


MESH_OPTIONS = _inverted(AXIS_ALIASES) | _inverted(
    {
        "data": "data_parallel_size dp_size data_parallel_replicate_degree ici_data_parallelism dcn_data_parallelism",
        "fsdp": "fsdp data_parallel_shard_degree ici_fsdp_parallelism",
        "tensor": "tensor tensor_parallel_size tensor_model_parallel_size tp_size tensor_parallel_degree "
        "ici_tensor_parallelism",
        "stage": "stage stages pipeline_parallel_size pipeline_model_parallel_size pp_size pipeline_parallel_degree "
        "ici_pipeline_parallelism",
        "context": "context context_parallel_size cp_size context_parallel_degree ici_context_parallelism "
        "ici_sequence_parallelism",
        "expert": "expert expert_model_parallel_size expert_parallel_size ep_size expert_parallel_degree "
        "ici_expert_parallelism",
    }
)
"""Option elsewhere that gives the degree of one mesh axis -> the axis: `--tp 8` is `--mesh tensor=8`."""

OPTIONS = _inverted(
    {
        "--model.width": "hidden_size d_model n_embd dim emb_dim base_emb_dim embed_dim",
        "--model.layers": "n_layers n_layer num_layers num_hidden_layers depth base_num_decoder_layers",
        "--model.heads": "n_heads n_head num_heads num_attention_heads base_num_query_heads",
        "--model.kv-heads": "num_key_value_heads n_kv_heads num_kv_heads num_query_groups base_num_kv_heads",
        "--model.head-size": "head_dim kv_channels d_head",
        "--model.mlp": "intermediate_size d_ff ffn_dim ffn_hidden_size mlp_dim base_mlp_dim",
        "--model.vocab": "vocab_size n_vocab",
        "--model.norm-epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
        "--model.embedding": "tie_word_embeddings tied_embeddings",
        "--model.experts": "num_experts n_experts num_local_experts n_routed_experts",
        "--model.experts-per-token": "top_k num_experts_per_tok moe_router_topk",
        "--model.shared-experts": "n_shared_experts",
        "--model.expert-mlp": "moe_intermediate_size",
        "--model.aux-loss-weight": "router_aux_loss_coef moe_aux_loss_coeff",
        "--steps": "max_steps num_steps train_iters max_iters train_steps total_steps iterations",
        "--batch": "batch_size global_batch_size train_batch_size",
        "--seq": "seq_len seq_length max_seq_len max_seq_length block_size context_length sequence_length "
        "max_target_length",
        "--training.microbatches": "grad_accum grad_accum_steps gradient_accumulation gradient_accumulation_steps "
        "accumulate_grad_batches num_microbatches num_pipeline_microbatches",
        "--training.remat": "remat_policy activation_checkpointing gradient_checkpointing recompute "
        "recompute_granularity rematerialization",
        "--training.compute-dtype": "dtype precision mixed_precision activation_dtype",
        "--training.param-dtype": "weight_dtype",
        "--training.reduce-dtype": "grad_dtype",
        "--training.attention-kernel": "attention attn_implementation attention_backend",
        "--seed": "random_seed data_seed",
        "--log-every": "log_interval logging_steps log_freq",
        "--training.eval-every": "eval_interval eval_steps",
        "--training.eval-samples": "eval_iters",
        "--training.save-every": "save_interval save_steps checkpoint_period checkpoint_interval",
        "--training.max-to-keep": "save_total_limit keep_latest_k",
        "--training.compiler-options": "xla_flags",
        "--lr": "base_lr max_lr peak_lr lr_max",
        "--optimizer.warmup-steps": "warmup num_warmup_steps warmup_iters lr_warmup_iters",
        "--optimizer.lr-schedule": "scheduler lr_scheduler lr_scheduler_type lr_decay_style decay",
        "--optimizer.final-lr-fraction": "min_lr min_lr_ratio",
        "--optimizer.grad-clip-norm": "max_grad_norm grad_clip clip_grad gradient_clipping_threshold max_norm",
        "--optimizer.weight-decay": "wd",
        "--optimizer.beta1": "adam_beta1 adam_b1 b1",
        "--optimizer.beta2": "adam_beta2 adam_b2 b2",
        "--optimizer.epsilon": "eps adam_epsilon adam_eps",
        "--optimizer.name": "optim opt opt_type optimizer",
        "--data": "dataset dataset_path data_path train_file",
        "--data.tokenizer": "tokenizer tokenizer_path tokenizer_model",
        "--data.held-out": "val_split val_fraction split",
        "--out": "output_dir out_dir save_dir base_output_directory save dump_folder output",
        "--resume": "resume_from_checkpoint load init_from",
        "--devices": "n_gpus num_gpus num_devices gpus",
        "--processes": "nproc_per_node nnodes num_processes",
        "--process": "process_id node_rank",
        "--coordinator": "master_addr coordinator_address",
        "--run": "config config_file job_config_file",
        "--name": "run_name exp_name",
        "--on": "target topology compile_topology hardware",
        "--layout": "strategy",
        "--mesh": "parallelism",
        "--report": "tensorboard_dir logger report_to",
    }
)
"""Option elsewhere (Hugging Face, nanoGPT, Megatron, MaxText, torchtitan), without prefixes -> our option."""

SETTINGS = {
    "cpu": "--devices 8",
    "tensorboard": "--report tensorboard",
    "hsdp": "--mesh data=N,fsdp=N",
    "no_shard": "--mesh data=N",
    **dict.fromkeys(("bf16", "bfloat16"), "--training.compute-dtype bfloat16"),
    **dict.fromkeys(("fp32", "float32"), "--training.compute-dtype float32"),
    **dict.fromkeys(("zero1", "zero_1", "use_distributed_optimizer"), "--layout zero1"),
    **dict.fromkeys(("zero3", "zero_3", "fully_sharded", "full_shard"), "--layout fsdp"),
}
"""Switch elsewhere -> our option and its value."""

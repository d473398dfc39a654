"""Every option of every stage, with its default, its help and the stages that list it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from data.dataset_options import DatasetOptions
from data.option import option
from data.option_checks import check_options
from data.prompt_options import PromptOptions


@dataclass
class RunConfig(PromptOptions, DatasetOptions):
    """Our options. `training` holds the keys of transformers.TrainingArguments as given, unparsed."""

    run_dir: str = option("runs/demo", "folder of everything that the run writes")
    target: str = option(
        "smollm2-135m-instruct", "folder, Hub id or .gguf file of the target; the default is the demo's model"
    )
    cache_dir: str = option("", "where the demo's model is kept (default: $XDG_CACHE_HOME or ~/.cache, under dartree)")
    target_adapter: str = option("", "folder of a LoRA adapter (peft) that is merged into the target")
    trust_remote_code: bool = option(False, "allow code that ships with the target")
    device: str = option("auto", "auto, cpu or cuda")
    dtype: str = option("auto", "auto, bf16 or fp32 for the target and for decoding")
    quantization: Literal["none", "bnb-int8", "bnb-nf4", "torchao-int8"] = option(
        "none", "load the target's weights in 8 or 4 bits (needs bitsandbytes or torchao)"
    )
    device_map: list[str] = option(
        [],
        "GPUs of one process over which a target too large for one is spread: auto, balanced, balanced_low_0, "
        "sequential, or cuda:0 cuda:1 ...; none for one device; training from stored features needs none",
    )
    seed: int = option(0, "seed of prompts, anchors, sampling and bootstrap")
    thinking: bool = option(
        False, "let a target reason before it answers, where its chat template knows enable_thinking"
    )
    template_args: list[str] = option(
        [], "further arguments of the chat template as KEY=VALUE, such as 'date_string=26 Jul 2024'"
    )

    max_prompt_length: int = option(
        512, "longer prompts are skipped and counted (tokens)", "regenerate eval demo train calibrate inspect bench"
    )
    max_answer_length: int = option(128, "answers are cut here (tokens)", "regenerate demo train")
    answer_temperature: float = option(0.0, "0 answers greedily", "regenerate demo")
    top_p: float = option(
        1.0, "answers are drawn from the likeliest tokens that together reach this share", "regenerate"
    )
    top_k: int = option(0, "answers are drawn from so many likeliest tokens; 0 is all", "regenerate")
    min_p: float = option(
        0.0, "answers are drawn from tokens with at least this share of the likeliest one's probability", "regenerate"
    )
    engine: Literal["auto", "local", "server", "recorded"] = option(
        "auto",
        "who answers: local (this process, or each rank of torchrun), server (endpoints), recorded (the data set's own "
        "answers, where the target wrote them); auto is server with endpoints, else local",
        "regenerate",
    )
    endpoints: list[str] = option(
        [], "OpenAI-compatible servers of the target, such as http://127.0.0.1:8000/v1, all used at once", "regenerate"
    )
    server_model: str = option("", "the target's name at the servers (default: found in /v1/models)", "regenerate")
    server_api: Literal["auto", "completions", "chat"] = option(
        "auto",
        "completions sends the prompt's tokens or text, chat sends messages, auto asks for completions first",
        "regenerate",
    )
    server_concurrency: int = option(64, "requests to each endpoint at once", "regenerate")
    server_timeout: float = option(600.0, "seconds after which a request is given up and made again", "regenerate")
    server_attempts: int = option(
        6, "tries after which a turn counts as failed; the next run tries it again", "regenerate"
    )
    server_patience: float = option(
        600.0, "seconds without an answer from any endpoint, all of them failing, that end the run", "regenerate"
    )
    server_key_variable: str = option(
        "", "name of the environment variable that holds the servers' key, where they want one", "regenerate"
    )
    answer_batch_size: int = option(64, "rows answered, or read for features, at once", "regenerate features demo")
    answers: str = option(
        "",
        "answers to train on: a folder of the stage dataset, a data set of the Hub, or another run's answers "
        "(default: RUN/answers)",
        "features train export",
    )
    keep_features: bool = option(
        True, "store the taps of the answers (bf16), so that training needs no target forward", "regenerate train demo"
    )
    features: Literal["auto", "online", "offline", "hybrid"] = option(
        "auto",
        "where training finds the target's hidden states: online (a forward each step), offline (RUN/cache, stage "
        "features), hybrid (the first epoch fills RUN/cache), auto (what is stored and suffices, else online)",
        "train",
    )
    time_budget: float = option(
        0.0, "seconds after which regenerate stops adding answers; 0 means no limit", "regenerate demo"
    )

    block_size: int = option(8, "slots of a block: the anchor and the masks", "train bench")
    mask_token_id: int | None = option(
        None, "id whose embedding fills the mask slots: never emitted, not pad, not eos", "train bench"
    )
    num_draft_layers: int = option(3, "layers of the drafter", "regenerate features train bench")
    target_layer_ids: list[int] = option(
        [], "target layers to tap, 0-based (default: spread as in the DFlash paper)", "regenerate features train"
    )
    num_taps: int = option(
        0,
        "number of taps when target_layer_ids is empty (default: one a drafter layer)",
        "regenerate features train bench",
    )
    shift_label: bool = option(False, "slot j predicts a+j+1 (shifted) instead of a+j (fill-in)", "train bench")
    head: str = option(
        "domino",
        "correction head: none, domino, markov_vanilla, markov_gated, markov_rnn, or another name of models/heads.py",
        "train bench",
    )
    head_rank: int = option(256, "rank of the correction", "train bench")
    gru_hidden_dim: int = option(1024, "state of Domino's GRU", "train bench")
    pure_draft_prefix_len: int | None = option(
        None,
        "leading predicted tokens that the head leaves alone (default: 1 for domino, 0 for other heads)",
        "train bench",
    )
    enable_confidence_head: bool = option(
        False, "train a confidence head: how likely is each token accepted?", "train bench"
    )
    confidence_head_with_markov: bool = option(
        False, "the confidence head looks at the Markov head's row of the previous token too", "train bench"
    )
    confidence_detach: bool = option(True, "the confidence loss trains the confidence head alone", "train bench")
    draft_vocab_size: int = option(
        0, "train head and loss on this many most frequent answer tokens; 0 means all", "train"
    )
    init_from_target: bool = option(True, "start the drafter's layers from the target's last layers", "train")

    global_batch_size: int = option(
        0,
        "rows of an optimizer step over all ranks: derives per-device batch (its key is then the limit) and "
        "accumulation; 0 leaves both as given",
        "train",
    )
    anchors_per_row: int = option(24, "anchors drawn in each row and epoch", "train bench")
    ce_weight: float = option(1.0, "weight of the cross entropy on the target's tokens", "train bench")
    kl_weight: float = option(0.0, "weight of the forward KL(target || drafter)", "train bench")
    tv_weight: float = option(0.0, "weight of the total variation, un-halved: sum |target - drafter|", "train bench")
    confidence_weight: float = option(1.0, "weight of the confidence head's loss, where there is one", "train bench")
    position_weights: Literal["exponential", "dpace"] = option(
        "exponential",
        "slot weights: exp(-depth/loss_gamma), or D-PACE from the drafter's own probabilities",
        "train bench",
    )
    loss_gamma: float = option(4.0, "gamma of the exponential slot weights", "train bench")
    dpace_alpha: float = option(0.5, "smoothing of D-PACE: s = (1-alpha) p(label) + alpha", "train bench")
    lambda_start: float = option(1.0, "share of the base loss at the first step", "train")
    lambda_end: float = option(0.0, "share of the base loss at the end of lambda_horizon", "train")
    lambda_horizon: float = option(
        1.0, "fraction of the run over which the share of the base loss goes from lambda_start to lambda_end", "train"
    )
    max_row_length: int = option(640, "rows are cut here (tokens)", "features train dataset")
    packing: bool = option(
        False, "several conversations share a row of max_row_length tokens, each for itself", "train"
    )
    attention: Literal["auto", "sdpa", "flex"] = option(
        "auto", "attention of the drafter in training; auto is flex on CUDA, sdpa elsewhere", "train"
    )
    dry_run: bool = option(False, "print parameters, memory, disk and steps of the run, and stop", "train")
    loss_chunk: int = option(
        0, "slots whose vocabulary logits exist at once; 0 holds one such array at 64 MiB", "train bench"
    )

    init_drafter: str = option(
        "",
        "drafter to start from, a folder or a Hub id: its backbone, and its head where the head's options agree",
        "train",
    )
    trainable: Literal["all", "head", "lora"] = option(
        "all",
        "what is trained: all weights; the head on a frozen backbone (lambda is then 0); LoRA on the backbone and the "
        "head in full",
        "train",
    )
    lora_rank: int = option(16, "rank of the LoRA adapter", "train")
    lora_alpha: float = option(32.0, "LoRA adds alpha/rank times its product", "train")
    lora_dropout: float = option(0.0, "dropout of LoRA's input", "train")
    lora_targets: list[str] = option(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"],
        "linear layers of the drafter that get LoRA",
        "train",
    )
    overfit_check: bool = option(
        False, "train on one sample until decoding accepts whole blocks, say pass or fail, and stop", "train"
    )
    train_eval_prompts: int = option(
        16, "held-out prompts decoded at each evaluation while training (eval_strategy, eval_steps)", "train"
    )
    train_eval_tokens: int = option(0, "tokens emitted for each of them; 0 means max_new_tokens", "train")
    train_eval_sources: list[str] = option(
        [],
        "where held-out prompts come from (default: benchmarks, beyond the eval_prompts that eval reports)",
        "train calibrate",
    )
    keep: Literal["best", "last"] = option(
        "best",
        "which weights become RUN/drafter when training evaluates: best by metric_for_best_model, or last",
        "train",
    )

    drafter: str = option(
        "",
        "drafter: a folder or a Hub id, in any known format (default: the finished one of this config's run)",
        "eval calibrate export verify inspect bench",
    )
    benchmarks: list[str] = option(
        ["builtin"],
        "builtin (held-out prompts of the generator), gsm8k math500 aime25 humaneval mbpp mt-bench alpaca "
        'livecodebench, or paths of JSONL files of {"turns": [...]}',
        "dataset eval calibrate demo train",
    )
    benchmark_dir: str = option(
        "",
        "folder of NAME.jsonl files that stand for the benchmarks of the Hub",
        "prepare regenerate dataset eval calibrate demo train",
    )
    eval_prompts: int = option(
        16,
        "prompts of each benchmark, chosen by the seed; 0 means as many as the published tables",
        "prepare regenerate dataset eval calibrate demo setup train bench",
    )
    max_new_tokens: int = option(64, "tokens emitted for each prompt", "eval calibrate demo verify train inspect bench")
    methods: list[str] = option(
        ["all"],
        "ar dflash_chain domino_chain markov_chain ddtree per_node_serial dartree_fixed dartree_pruned",
        "eval demo verify",
    )
    temperatures: list[float] = option([0.0], "sampling temperatures of the target", "eval calibrate demo")
    budget: int = option(64, "tree nodes B, the root not counted", "eval verify demo train inspect bench")
    width: int = option(12, "nodes W kept at each depth by dartree_pruned", "eval verify demo train inspect bench")
    candidates: int = option(64, "base candidates K at each depth", "eval verify demo train inspect bench")
    beta: float = option(-0.2, "depth penalty of the final pruning, <= 0", "eval verify demo train inspect bench")
    confidence_threshold: float = option(
        0.0,
        "a head's chain ends before the first token whose confidence lies below, with the temperature of "
        "RUN/calibration.json if there is one; 0 is off",
        "eval verify demo",
    )
    calibration_prompts: int = option(32, "held-out prompts decoded to calibrate the confidence head", "calibrate")
    choose_budget: bool = option(
        True, "also run dartree_pruned at a budget chosen from measured cost on training prompts", "eval demo"
    )
    acceptance: list[Literal["sample-match", "rejection"]] = option(
        ["sample-match", "rejection"],
        "how chains accept at T > 0: sample-match, rejection, or both, a row each",
        "eval",
    )
    budget_policy: list[Literal["fixed", "adaptive", "cost-aware"]] = option(
        ["fixed"],
        "how dartree_pruned sets B, a row each: fixed, adaptive (by requests decoded at once), cost-aware (in each "
        "round, by measured cost and the drafter's probabilities)",
        "eval",
    )
    adaptive_budget: list[str] = option(
        ["1:64:12", "4:32:3"],
        "adaptive: REQUESTS:BUDGET:WIDTH from so many requests at once on; budget 0 drafts nothing",
        "eval",
    )
    concurrency: list[int] = option(
        [],
        "numbers of requests decoded at once whose throughput is measured, such as 1 2 4 8 16",
        "eval calibrate train",
    )
    concurrency_prompts: int = option(
        32, "prompts of the first benchmark decoded at every concurrency", "eval calibrate train"
    )
    concurrency_runs: int = option(1, "times that each of these measurements is repeated", "eval")
    max_cache_gb: float = option(16.0, "memory that keys and values of all requests at once may take", "eval train")
    sweep_budget: list[int] = option([], "values of B to compare for ddtree and dartree_pruned", "eval")
    sweep_width: list[int] = option([], "values of W to compare for dartree_pruned", "eval")
    sweep_candidates: list[int] = option([], "values of K to compare for dartree_pruned", "eval")
    sweep_beta: list[float] = option([], "values of beta to compare for dartree_pruned", "eval")
    sweep_benchmark: str = option("", "benchmark of the sweeps (default: the first one)", "eval")
    sweep_prompts: int = option(8, "prompts of the sweeps", "eval")
    near_tie: float = option(
        1e-4, "fp32 top-2 gap under which a difference from AR counts as a near tie", "eval verify demo"
    )
    trace_prompts: int = option(
        2, "prompts of each benchmark whose trees report.html shows, decoded unmeasured; 0 for none", "eval demo"
    )
    output: str = option("", "folder to write (default: RUN_DIR/export)", "export")
    format: Literal["transformers", "zlab", "deepspec", "speculators", "modelopt"] = option(
        "transformers", "what the exported folder is for: transformers' AutoModel, or another program's names", "export"
    )
    allow_extra: bool = option(
        False,
        "go on when a drafter holds keys or tensors that are not known here",
        "train eval calibrate export verify inspect bench",
    )

    parts: list[str] = option(
        [],
        "what bench measures: tree share batch, with --training loss step, with --data masks (default: all)",
        "bench",
    )
    bench_repeats: int = option(9, "turns of each measurement after the warm-up", "bench")
    bench_processes: int = option(2, "with --data: processes at once, against one", "bench")
    bench_concurrency: int = option(8, "requests decoded at once, against one at a time", "bench")

    training: dict = option({}, "keys of transformers.TrainingArguments", "train")

    def __post_init__(self):
        if self.device_map == ["none"]:  # on a command line, where a config spreads the target
            self.device_map = []
        if self.pure_draft_prefix_len is None:
            self.pure_draft_prefix_len = int(self.head == "domino")
        check_options(self)

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss needs the target's own distribution, and so its final hidden states."""
        return self.kl_weight > 0 or self.tv_weight > 0 or self.enable_confidence_head

    def path(self, *parts: str) -> str:
        return os.path.join(self.run_dir, *parts)

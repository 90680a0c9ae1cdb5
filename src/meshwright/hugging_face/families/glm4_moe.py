"""GLM-4.5 as `transformers` names it: Llama's attention and DeepSeek-V3's experts."""

from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.deepseek import BIAS_UPDATE_RATE, DEEPSEEK_EXPERTS, NAMES, V3_BALANCE_WEIGHT
from meshwright.hugging_face.families.llama import MLP, SIZES, epsilon
from meshwright.hugging_face.families.rope import partial_rope
from meshwright.hugging_face.table import LLAMA, choice, flag, given, must, same, without_effect
from meshwright.models.families.glm4_moe import Glm4Moe

_TABLE = (
    *SIZES,
    MLP,
    epsilon(1e-5),
    partial_rope(0.5),
    flag("attention_bias", "qkv_bias"),
    choice("use_qk_norm", "qk_norm", {False: "none", True: "rms"}),
    *DEEPSEEK_EXPERTS,
    same("norm_topk_prob", "normalize_top_k", True),
    same("n_group", "expert_groups", 1),
    same("topk_group", "topk_groups", 1),
    must(router_score="sigmoid"),
    given(bias_update_rate=BIAS_UPDATE_RATE, aux_loss_weight=V3_BALANCE_WEIGHT),
    without_effect("num_nextn_predict_layers", "num_mtp_layers"),
)
_NAMES = {**NAMES, "query_norm": LLAMA["query_norm"]}
_MTP = r"model\.layers\.(46|92)\..*"
"""Layer that predicts the token after the next, in the published weights; `transformers` does not read it either."""

ARCHITECTURES = (Architecture("Glm4MoeForCausalLM", "glm4_moe", Glm4Moe, _TABLE, _NAMES, left_out=(_MTP,)),)

"""The models that `public_models.py` trains: how they are made, small and with random weights, and their batches."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

SIDE = 64
WORDS = 100
Batch = tuple[tuple[Any, ...], dict[str, Any]]
Made = tuple[nn.Module, Callable[[], Batch]]
"""A model, and a function that draws a batch: positional and keyword arguments."""


def draws(*shape: int, **more: tuple[int, ...]) -> Callable[[], Batch]:
    """Return a function that draws one positional tensor of a shape, and further ones by keyword."""
    return lambda: ((torch.randn(shape),) if shape else (), {k: torch.randn(s) for k, s in more.items()})


def boxes(count: int, side: int) -> dict[str, torch.Tensor]:
    """Return the targets of an image for detectors: boxes, labels, masks and keypoints."""
    corners = torch.rand(count, 2) * side / 2
    return {
        "boxes": torch.cat([corners, corners + 8 + torch.rand(count, 2) * side / 4], 1),
        "labels": torch.randint(1, 4, (count,)),
        "masks": torch.randint(0, 2, (count, side, side), dtype=torch.uint8),
        "keypoints": torch.cat([torch.rand(count, 17, 2) * side, torch.ones(count, 17, 1)], 2),
    }


def of_timm(name: str) -> Made:
    """Return a model of timm: images of 64 pixels if it takes them, otherwise of its own size."""
    import timm

    for options in ({"img_size": SIDE}, {}):
        try:
            model = timm.create_model(name, num_classes=10, **options)
        except (TypeError, AssertionError, ValueError, RuntimeError):
            continue
        break
    config = model.pretrained_cfg
    own = options == {} and (
        config.get("fixed_input_size") or "img_size" in inspect.signature(type(model)).parameters
    )
    side = config["input_size"][-1] if own else SIDE
    return model, draws(2 if own else 4, 3, side, side)


TIMM = """
resnet18 resnet26d resnext26ts resnetv2_18 resnetv2_18d regnetx_002 regnety_002 efficientnet_b0
tf_efficientnetv2_b0 mobilenetv2_050 mobilenetv3_small_050 mobilenetv4_conv_small_050 mnasnet_050 ghostnet_050
ghostnetv3_050 lcnet_050 tinynet_e hardcorenas_a convnext_atto convnextv2_atto inception_next_atto
mambaout_femto starnet_s050 mobileone_s0 repvgg_a0 repvit_m0_9 fastvit_t8 efficientformerv2_s0 efficientvit_b0
efficientvit_m0 edgenext_xx_small mobilevit_xxs mobilevitv2_050 levit_128s poolformer_s12 caformer_s18
nf_resnet26 nfnet_l0 eca_nfnet_l0 nf_regnet_b0 dla34 densenet121 dpn48b hrnet_w18_small vovnet39a
ese_vovnet19b_dw res2net50_14w_8s resnest14d skresnet18 seresnet18 selecsls42 rexnet_100 cspresnet50 darknet17
xception41 inception_v3 inception_v4 nasnetalarge vgg11_bn hgnet_tiny vit_tiny_patch16_224
deit_tiny_patch16_224 deit_tiny_distilled_patch16_224 vit_relpos_small_patch16_224 beit_base_patch16_224
eva02_tiny_patch14_224 cait_xxs24_224 xcit_nano_12_p16_224 convit_tiny crossvit_tiny_240 coat_tiny pit_ti_224
tnt_s_legacy_patch16_224 twins_pcpvt_small visformer_tiny volo_d1_224 mixer_s32_224 gmlp_ti16_224
resmlp_12_224 pvt_v2_b0 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 davit_tiny
gcvit_xxtiny focalnet_tiny_srf mvitv2_tiny nest_tiny maxvit_nano_rw_256 coatnet_nano_rw_224 hiera_tiny_224
tiny_vit_5m_224 sequencer2d_s nextvit_small vitamin_small_224 vit_tiny_r_s16_p8_224 test_vit
"""
TORCHVISION = """
alexnet vgg11 resnet18 wide_resnet50_2 densenet121 googlenet inception_v3 mnasnet0_5 mobilenet_v2
mobilenet_v3_small shufflenet_v2_x0_5 squeezenet1_1 efficientnet_b0 efficientnet_v2_s regnet_y_400mf
convnext_tiny swin_t swin_v2_t maxvit_t vit_b_32 deeplabv3_mobilenet_v3_large fcn_resnet50
lraspp_mobilenet_v3_large fasterrcnn_mobilenet_v3_large_320_fpn fasterrcnn_resnet50_fpn maskrcnn_resnet50_fpn
keypointrcnn_resnet50_fpn retinanet_resnet50_fpn fcos_resnet50_fpn ssd300_vgg16 ssdlite320_mobilenet_v3_large
raft_small r3d_18 mc3_18 r2plus1d_18 s3d swin3d_t mvit_v1_b
"""
SMP = "unet unetplusplus manet linknet fpn pspnet pan deeplabv3 deeplabv3plus upernet segformer"
SIDES = {"mvit": 224, "maxvit": 224, "s3d": 224, "inception": 299}
"""The sides of images of those models of torchvision that take no others, by the beginnings of their names."""
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "swin3d_t", "mvit_v1_b", "mvit_v2_s")


def of_torchvision(name: str) -> Made:
    """Return a model of torchvision, detectors with targets."""
    import torchvision

    detects = hasattr(torchvision.models.detection, name)
    side = next((size for part, size in SIDES.items() if name.startswith(part)), 96)
    sizes: dict[str, Any] = {"weights_backbone": None} if detects or "segmentation" in _home(name) else {}
    if detects and not name.startswith("ssd"):
        sizes |= {"min_size": side, "max_size": side}
    classes = {} if name.startswith("raft") else {"num_classes": 2 if name.startswith("keypoint") else 4}
    model = torchvision.models.get_model(name, weights=None, **classes, **sizes)
    if detects:
        return model, lambda: (
            ([torch.rand(3, side, side) for _ in range(2)], [_detected(name, side) for _ in range(2)]),
            {},
        )
    if name.startswith("raft"):
        return model, lambda: ((torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)), {})
    frames = (16,) if name in VIDEO else ()
    return model, draws(2, 3, *frames, side, side)


def _home(name: str) -> str:
    import torchvision

    return str(inspect.getmodule(torchvision.models.get_model_builder(name)).__name__)


def _detected(name: str, side: int) -> dict[str, torch.Tensor]:
    found = boxes(3, side)
    return {**found, "labels": torch.ones_like(found["labels"])} if name.startswith("keypoint") else found


def of_smp(name: str) -> Made:
    """Return a decoder of segmentation_models_pytorch over a ResNet-18."""
    import segmentation_models_pytorch as smp

    model = smp.create_model(name, encoder_name="resnet18", encoder_weights=None, classes=3)
    side = 2 * SIDE if name == "pan" else SIDE
    return model, draws(2, 3, side, side)


SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "decoder_hidden_size"), 64),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "d_ff", "hidden_dim", "ffn_dim", "encoder_ffn_dim"), 128
    ),
    **dict.fromkeys(("decoder_ffn_dim", "feed_forward_size", "moe_intermediate_size"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), 2),
    **dict.fromkeys(
        ("decoder_layers", "num_decoder_layers", "num_key_value_heads", "num_experts_per_tok"), 2
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_experts"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_local_experts"), 4),
    **{
        "vocab_size": WORDS,
        "decoder_vocab_size": WORDS,
        "image_size": SIDE,
        "d_kv": 16,
        "head_dim": 16,
        "use_cache": False,
    },
    **{
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "num_queries": 12,
    },
    **{"use_pretrained_backbone": False, "max_position_embeddings": 256},
}
"""The values of those entries that a configuration of transformers has, unless `CONFIGURED` states others."""
SOUND: dict[str, Any] = {"conv_dim": [32] * 3, "conv_kernel": [10, 4, 2], "conv_stride": [8, 4, 2]}
SOUND |= {"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
SERIES: dict[str, Any] = {
    "prediction_length": 8,
    "context_length": 16,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
}
STAGES: dict[str, Any] = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}
WINDOWS: dict[str, Any] = {
    "embed_dim": 24,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "hidden_size": 48,
}
CONFIGURED: Mapping[str, dict[str, Any]] = {
    "AutoformerForPrediction": {**SERIES, "moving_average": 5},
    "InformerForPrediction": SERIES,
    "TimeSeriesTransformerForPrediction": SERIES,
    "PatchTSTForPrediction": {"context_length": 64, "num_input_channels": 3},
    "T5ForConditionalGeneration": {"decoder_start_token_id": 0},
    "SwitchTransformersForConditionalGeneration": {"decoder_start_token_id": 0},
    "ConvNextForImageClassification": {**STAGES, "num_hidden_layers": 4},
    "ResNetForImageClassification": STAGES,
    "SegformerForImageClassification": STAGES,
    "SegformerForSemanticSegmentation": STAGES,
    "SwinForImageClassification": WINDOWS,
    "Swinv2ForImageClassification": WINDOWS,
    "DebertaV2ForMaskedLM": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "LongformerForMaskedLM": {"attention_window": 8},
    "Mamba2ForCausalLM": {
        **{"hidden_size": 64, "head_dim": 16, "num_heads": 8, "state_size": 16},
        **{"chunk_size": 16, "n_groups": 1},
    },
    "WhisperForConditionalGeneration": {"num_mel_bins": 8, "max_source_positions": 64},
    "Speech2TextForConditionalGeneration": {"input_feat_per_channel": 8, "conv_channels": 32},
    **dict.fromkeys(("Wav2Vec2ForCTC", "HubertForCTC", "Data2VecAudioForCTC", "WavLMForCTC"), SOUND),
}
TRANSFORMERS = """
AlbertForMaskedLM BertForMaskedLM BertForSequenceClassification BigBirdForMaskedLM ConvBertForMaskedLM
DebertaV2ForMaskedLM DistilBertForMaskedLM LongformerForMaskedLM ModernBertForMaskedLM
NystromformerForMaskedLM RobertaForMaskedLM BloomForCausalLM FalconForCausalLM Gemma2ForCausalLM
GPT2LMHeadModel GPTNeoXForCausalLM JetMoeForCausalLM LlamaForCausalLM MambaForCausalLM Mamba2ForCausalLM
MistralForCausalLM MixtralForCausalLM OPTForCausalLM PhiForCausalLM Qwen2ForCausalLM Qwen3MoeForCausalLM
BartForConditionalGeneration M2M100ForConditionalGeneration MarianMTModel T5ForConditionalGeneration
SwitchTransformersForConditionalGeneration Speech2TextForConditionalGeneration WhisperForConditionalGeneration
Data2VecAudioForCTC HubertForCTC Wav2Vec2ForCTC WavLMForCTC CLIPModel ConvNextForImageClassification
Dinov2ForImageClassification ResNetForImageClassification SegformerForImageClassification
SwinForImageClassification Swinv2ForImageClassification ViTForImageClassification ViTMAEForPreTraining
DetrForObjectDetection YolosForObjectDetection MaskFormerForInstanceSegmentation
Mask2FormerForUniversalSegmentation AutoformerForPrediction InformerForPrediction PatchTSTForPrediction
TimeSeriesTransformerForPrediction
"""


def reduced(config: Any, stated: Collection[str] = ()) -> Any:
    """Give a configuration of transformers, and those in it, the sizes of `SMALL` that are not stated."""
    for key, value in [*vars(config).items()]:
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            reduced(value)
        elif isinstance(value, list) and key == "layer_types":
            setattr(config, key, value[:2])
    for key, value in SMALL.items():
        if key not in stated and isinstance(getattr(config, key, ""), (int, float, type(None))):
            with suppress(AttributeError):  # a property
                setattr(config, key, value)
    return config


def of_transformers(name: str) -> Made:
    """Return a model of transformers, with the arguments of its task."""
    import transformers

    kind = getattr(transformers, name)
    stated = CONFIGURED.get(name, {})
    model = kind(reduced(kind.config_class(**stated), stated))
    return model, partial(_arguments, name, model.main_input_name, model.config)


def _arguments(name: str, main: str, config: Any) -> Batch:
    ids = torch.randint(3, WORDS, (4, 32))
    image = torch.randn(2, 3, SIDE, SIDE)
    texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    objects = [{"class_labels": torch.randint(0, 2, (3,)), "boxes": torch.rand(3, 4) / 2} for _ in range(2)]
    masks = [torch.randint(0, 2, (3, SIDE, SIDE)).float() for _ in range(2)]
    series = {k: torch.randn(4, n) for k, n in (("past_values", 18), ("future_values", 8))}
    series |= {k.replace("values", "time_features"): v[..., None] for k, v in series.items()}
    series["past_observed_mask"] = torch.ones(4, 18)
    spectra = (
        torch.randn(2, config.num_mel_bins, 128) if name.startswith("Whisper") else torch.randn(2, 64, 8)
    )
    table: tuple[tuple[str, dict[str, Any]], ...] = (
        ("CLIPModel", {**texts, "pixel_values": torch.randn(4, 3, SIDE, SIDE), "return_loss": True}),
        ("PatchTST", {"past_values": torch.randn(4, 64, 3), "future_values": torch.randn(4, 24, 3)}),
        ("ForPrediction", series),
        ("ForObjectDetection", {"pixel_values": image, "labels": objects}),
        (
            "Segmentation",
            {"pixel_values": image, "mask_labels": masks, "class_labels": [torch.randint(0, 2, (3,))] * 2},
        ),
        ("ForImageClassification", {"pixel_values": image, "labels": torch.randint(0, 2, (2,))}),
        ("ForPreTraining", {"pixel_values": image}),
        ("ForCTC", {"input_values": torch.randn(2, 4000), "labels": ids[:2, :8]}),
        ("ForSequenceClassification", {**texts, "labels": torch.randint(0, 2, (4,))}),
        (
            "",
            {"input_features": spectra, "labels": ids[:2]}
            if main == "input_features"
            else {**texts, "labels": ids},
        ),
    )
    return (), next(arguments for part, arguments in table if part in name)


@dataclass(frozen=True)
class Row:
    """A model of a table: the arguments of its class, and what draws a batch."""

    batch: Callable[[], Batch]
    settings: Mapping[str, Any]


LEVELS: dict[str, Any] = {"block_out_channels": (32, 64), "norm_num_groups": 8}
CODING: dict[str, Any] = {
    **LEVELS,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
CROSSED: dict[str, Any] = {
    **{"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 32},
    **{"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 8},
}
PLAIN: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
TIMES = {"timestep": torch.tensor([10, 500])}


def at_times(*shape: int, **more: tuple[int, ...]) -> Callable[[], Batch]:
    """Return a function that draws the arguments of a diffusion model: latents, and others by keyword."""
    return lambda: ((torch.randn(shape),), {**{k: torch.randn(v) for k, v in more.items()}, **TIMES})


PICTURE, LATENT = draws(2, 3, SIDE, SIDE), (2, 4, 16, 16)
DIFFUSERS = {
    "AutoencoderKL": Row(PICTURE, CODING),
    "UNet2DConditionModel": Row(at_times(*LATENT, encoder_hidden_states=(2, 6, 32)), {**LEVELS, **CROSSED}),
    "UNet2DModel": Row(at_times(2, 3, 32, 32), {**LEVELS, **PLAIN}),
    "VQModel": Row(PICTURE, {**CODING, "num_vq_embeddings": 32}),
}
SPACE: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
TWICE: dict[str, Any] = {**SPACE, "channels": (8, 16, 32), "strides": (2, 2)}
IMAGE = draws(2, 1, SIDE, SIDE)
MONAI = {
    "AttentionUnet": Row(IMAGE, TWICE),
    "AutoEncoder": Row(IMAGE, {**TWICE, "channels": (8, 16)}),
    "DenseNet121": Row(IMAGE, SPACE),
    "DynUNet": Row(
        IMAGE,
        {
            **{**SPACE, "kernel_size": [3] * 3, "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]},
            "deep_supervision": True,
        },
    ),
    "HighResNet": Row(IMAGE, SPACE),
    "SegResNet": Row(IMAGE, {**SPACE, "dropout_prob": 0.1}),
    "SwinUNETR": Row(IMAGE, {**SPACE, "feature_size": 12, "depths": (1, 1, 1, 1)}),
    "UNet": Row(IMAGE, {**TWICE, "num_res_units": 2, "dropout": 0.1}),
    "VNet": Row(draws(1, 1, SIDE, SIDE), {**SPACE, "dropout_dim": 2}),
}


def graph(features: int = 16, nodes: int = 400, edges: int = 2000) -> Batch:
    """Return a random graph: the features of its nodes, and its edges."""
    return (torch.randn(nodes, features), torch.randint(0, nodes, (2, edges))), {}


class Pooled(nn.Module):
    """Two convolutions over a graph, the first followed by a pooling layer that keeps the nodes of highest score."""

    def __init__(self, library: Any, pooling: str) -> None:
        super().__init__()
        self.first, self.second = library.GCNConv(16, 64), library.GraphConv(64, 64)
        self.pooling, self.mean = getattr(library, pooling)(64), library.global_mean_pool

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> Any:
        """Return the mean of the second convolution's features."""
        kept = self.pooling(self.first(x, edges).relu(), edges)
        return self.mean(self.second(kept[0], kept[1]).relu(), None)


POOLINGS = ("ASAPooling", "SAGPooling", "TopKPooling")
NETWORK: dict[str, Any] = {"in_channels": 16, "hidden_channels": 64, "out_channels": 8}
DROPPED: dict[str, Any] = {**NETWORK, "num_layers": 3, "dropout": 0.1, "norm": "batch"}
GRAPHS = {
    **dict.fromkeys(("EdgeCNN", "GAT", "GCN", "GIN", "GraphSAGE"), Row(graph, DROPPED)),
    "GraphUNet": Row(graph, {**NETWORK, "depth": 2}),
}


def of_pyg(name: str) -> Made:
    """Return a graph network of torch_geometric."""
    import torch_geometric.nn

    if name in POOLINGS:
        return Pooled(torch_geometric.nn, name), graph
    return of_table("torch_geometric.nn", GRAPHS, name)


def _lengths(*shape: int, last: int) -> Callable[[], Batch]:
    return lambda: ((torch.randn(shape), torch.tensor([last, last - 4])), {})


SPEECH: dict[str, Any] = {"input_dim": 16, "num_heads": 2, "ffn_dim": 32, "num_layers": 2}
MASKS: dict[str, Any] = {
    **{"enc_num_feats": 32, "msk_num_feats": 16, "msk_num_hidden_feats": 32},
    **{"msk_num_layers": 3, "msk_num_stacks": 2},
}
WAVES = {
    "Conformer": Row(
        _lengths(2, 40, 16, last=40), {**SPEECH, "depthwise_conv_kernel_size": 7, "dropout": 0.1}
    ),
    "ConvTasNet": Row(draws(2, 1, 2000), MASKS),
    "DeepSpeech": Row(draws(2, 1, 40, 16), {"n_feature": 16, "n_hidden": 64, "n_class": 20}),
    "Wav2Letter": Row(draws(2, 13, 200), {"num_classes": 20, "input_type": "mfcc", "num_features": 13}),
}


def of_table(module: str, table: Mapping[str, Row], name: str) -> Made:
    """Return a model of a table. ``module``: has its class."""
    row = table[name]
    return getattr(importlib.import_module(module), name)(**row.settings), row.batch


@dataclass(frozen=True)
class Library:
    """A library of models. ``module``: what is imported. ``names``: the models that are tried. ``make``: makes one."""

    module: str
    names: Sequence[str]
    make: Callable[[str], Made]


LIBRARIES: Mapping[str, Library] = {
    "timm": Library("timm", TIMM.split(), of_timm),
    "torchvision": Library("torchvision", TORCHVISION.split(), of_torchvision),
    "smp": Library("segmentation_models_pytorch", SMP.split(), of_smp),
    "transformers": Library("transformers", TRANSFORMERS.split(), of_transformers),
    "diffusers": Library("diffusers", [*DIFFUSERS], partial(of_table, "diffusers", DIFFUSERS)),
    "monai": Library("monai", [*MONAI], partial(of_table, "monai.networks.nets", MONAI)),
    "pyg": Library("torch_geometric", [*GRAPHS, *POOLINGS], of_pyg),
    "torchaudio": Library("torchaudio", [*WAVES], partial(of_table, "torchaudio.models", WAVES)),
}

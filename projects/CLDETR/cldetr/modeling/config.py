"""The config keys of the detectors, under MODEL.DETR, and of the small backbone."""

from __future__ import annotations

from detectron2.config import CfgNode


def add_model_config(cfg: CfgNode) -> None:
    """Adds the keys; the defaults are Deformable DETR's as the paper trains it."""
    cfg.MODEL.DETR = CfgNode()
    detr = cfg.MODEL.DETR
    # K: all classes of all phases; the head has a row for each from the start of a run. 0: as many
    # as the data have.
    detr.NUM_CLASSES = 0
    detr.NUM_QUERIES = 300  # N of the paper: object hypotheses per image
    # Deformable DETR only. For each class the group of NUM_QUERIES queries that predict it, from 0;
    # groups do not attend to each other. [-1]: a group for each phase; []: one group for all.
    detr.QUERY_GROUPS = []
    detr.HIDDEN_DIM = 256  # width of the transformer
    detr.HEADS = 8
    detr.ENC_LAYERS = 6
    detr.DEC_LAYERS = 6
    detr.FFN_DIM = 1024
    detr.DROPOUT = 0.1
    # Outputs of the backbone that are used, finest first. DETR uses the last one alone.
    detr.IN_FEATURES = ["res3", "res4", "res5"]
    # An image's predictions do not depend on the others in its batch. False pads first and computes
    # the backbone's features of the whole batch, as the official implementations do.
    detr.EXACT_PADDING = True
    # Compute each transformer layer again in the backward pass: less memory, more time.
    detr.CHECKPOINTING = False
    # Results: each query's best class (DETR), or the best (query, class) pairs (Deformable DETR).
    # How many: TEST.DETECTIONS_PER_IMAGE.
    detr.ONE_CLASS_PER_QUERY = False

    # Deformable DETR only.
    detr.LEVELS = 4  # feature levels; those beyond IN_FEATURES come from strided convolutions
    detr.ENC_POINTS = 4  # sampled points per head and level
    detr.DEC_POINTS = 4
    detr.WITH_BOX_REFINE = False  # every decoder layer refines the boxes of the one before
    detr.TWO_STAGE = False  # queries from the encoder's proposals; needs WITH_BOX_REFINE

    # DETR only.
    detr.PRE_NORM = False  # normalise before each sub-layer (UP-DETR) and not after it

    # L_DETR, Eq. 1. Weights of the class loss, of the L1 loss (γ_2) and of the IoU loss (γ_1).
    detr.LOSS = CfgNode()
    detr.LOSS.CLASS_WEIGHT = 2.0
    detr.LOSS.BOX_WEIGHT = 5.0
    detr.LOSS.GIOU_WEIGHT = 2.0
    detr.LOSS.FOCAL_ALPHA = 0.25  # Deformable DETR's sigmoid head
    detr.LOSS.FOCAL_GAMMA = 2.0
    detr.LOSS.NO_OBJECT_WEIGHT = 0.1  # DETR's softmax head
    # Teach every decoder layer. Without it the earlier layers' own heads, which box refinement has,
    # get no gradient, and distributed training must be told to look for unused parameters.
    detr.LOSS.AUX = True

    # The matching, Eq. 2.
    detr.COST = CfgNode()
    detr.COST.CLASS = 2.0
    detr.COST.BOX = 5.0
    detr.COST.GIOU = 2.0

    # HuggingFaceDetector only.
    cfg.MODEL.HUGGINGFACE = CfgNode()
    hugging = cfg.MODEL.HUGGINGFACE
    hugging.NAME = ""  # a folder that save_pretrained wrote, or a name on the hub
    # Start from its weights, but for the rows of the classes; False: at random.
    hugging.PRETRAINED = True
    # "ours": L_DETR, which every method can use; "native": the model's own loss on hard labels.
    hugging.LOSS = "ours"
    hugging.FREEZE_BATCH_NORM = False  # keep the statistics and weights of batch normalisation
    hugging.ALLOW_PICKLE = False  # load a pickle where there are no safetensors
    # The settings of the model and its image processor, as JSON. A run fills it in from NAME, and
    # its weights need the folder no more.
    hugging.CONFIG = ""

    # build_small_resnet_backbone: channels of res2, res3, res4, res5.
    cfg.MODEL.SMALL_RESNET = CfgNode()
    cfg.MODEL.SMALL_RESNET.CHANNELS = [32, 64, 96, 128]

    # build_torchvision_backbone. IN_FEATURES are stride8, stride16 and so on; MODEL.WEIGHTS takes
    # torchvision's weight files and names (torchvision://ResNet18_Weights.IMAGENET1K_V1).
    cfg.MODEL.TORCHVISION = CfgNode()
    cfg.MODEL.TORCHVISION.NAME = "mobilenet_v3_large"  # a classification network of torchvision
    cfg.MODEL.TORCHVISION.NORM = "FrozenBN"  # or "BN", to train batch norms from scratch

"""Image processor of Idefics3 without torchvision, as code that is saved in the model folder.

transformers 5.17 has the class but does not offer it without torchvision: its lazy import assumes that every image
processor file with the word "TorchvisionBackend", even in a docstring, needs torchvision. An engine therefore loads
this class, with `trust_remote_code`.
"""

from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil


class PilIdefics3ImageProcessor(Idefics3ImageProcessorPil):
    """The class of transformers under another name."""


PilIdefics3ImageProcessor.register_for_auto_class("AutoImageProcessor")

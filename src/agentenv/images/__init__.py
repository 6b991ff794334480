"""Container images: what a name means, where it is, its layers as layers of a disk, and a disk as an image again.

Owns references, registries, layouts and archives, Dockerfiles' bases, and the order of a conversion. Does not own the
file system inside a layer (`aenv-image`, a process), nor where layers are kept (`ConvertedLayers`, the repository's).

    parse_reference / dockerfile_base -> open_source
        -> find_accelerated (and WholeLayers), else Converter.convert -> a DiskStack
"""

from agentenv.images.accelerated import AcceleratedImage, AcceleratedOptions, RegistryBlob, find_accelerated
from agentenv.images.config import ImageConfig, parse_config
from agentenv.images.convert import ConvertedImage, ConvertedLayer, ConvertedLayers, Converter
from agentenv.images.credentials import Credentials
from agentenv.images.dockerfile import DockerfileBase, dockerfile_base
from agentenv.images.endpoints import HostSettings, RegistrySettings, store_entry
from agentenv.images.export import ExportedImage, ExportJob, export_archive, export_layout
from agentenv.images.fake import FakeConvertedLayers, FakeLayerMaker
from agentenv.images.manifest import LINUX_AMD64, Platform, parse_platform
from agentenv.images.places import ScratchSource, open_source
from agentenv.images.program import ImageProgram, LayerMaker
from agentenv.images.reference import LocalReference, RegistryReference, Transport, parse_reference
from agentenv.images.registry import RegistryClient
from agentenv.images.registry_source import RegistrySource
from agentenv.images.repository_layers import RepositoryLayers
from agentenv.images.source import Image, ImageLayer, Source
from agentenv.images.whole import WholeLayers

__all__ = [
    "LINUX_AMD64",
    "AcceleratedImage",
    "AcceleratedOptions",
    "ConvertedImage",
    "ConvertedLayer",
    "ConvertedLayers",
    "Converter",
    "Credentials",
    "DockerfileBase",
    "ExportJob",
    "ExportedImage",
    "FakeConvertedLayers",
    "FakeLayerMaker",
    "HostSettings",
    "Image",
    "ImageConfig",
    "ImageLayer",
    "ImageProgram",
    "LayerMaker",
    "LocalReference",
    "Platform",
    "RegistryBlob",
    "RegistryClient",
    "RegistryReference",
    "RegistrySettings",
    "RegistrySource",
    "RepositoryLayers",
    "ScratchSource",
    "Source",
    "Transport",
    "WholeLayers",
    "dockerfile_base",
    "export_archive",
    "export_layout",
    "find_accelerated",
    "open_source",
    "parse_config",
    "parse_platform",
    "parse_reference",
    "store_entry",
]

"""Decoding: the cache of one layer, caches that take a fixed number of tokens a row on the device,
and such a step as one CUDA graph.

``views`` is what attention and ``cache`` exchange; ``graph_cache`` makes caches step without the
host; ``graph`` captures such a step, ``layer_graphs`` each layer's. ``paged`` keeps all layers'
keys in pages, for rows that join and leave. ``one_step`` says where one operator for all branches
stores a token, in either.
"""

from nsa.decode.cache import NSACache as NSACache
from nsa.decode.cache import check_cache as check_cache
from nsa.decode.chunk_graph import ChunkGraph as ChunkGraph
from nsa.decode.dense_cache import DenseCache as DenseCache
from nsa.decode.dense_cache import DenseView as DenseView
from nsa.decode.dense_cache import check_dense_cache as check_dense_cache
from nsa.decode.graph import DecodeGraph as DecodeGraph
from nsa.decode.graph import capture as capture
from nsa.decode.graph import check_device as check_device
from nsa.decode.graph import warm_up as warm_up
from nsa.decode.graph_cache import Steps as Steps
from nsa.decode.layer_graphs import LayerGraphs as LayerGraphs
from nsa.decode.paged import OutOfPages as OutOfPages
from nsa.decode.paged import PagedCache as PagedCache
from nsa.decode.paged import PagedGraph as PagedGraph
from nsa.decode.paged import PageShape as PageShape
from nsa.decode.views import KV as KV
from nsa.decode.views import DenseStep as DenseStep
from nsa.decode.views import PagedView as PagedView
from nsa.decode.views import Step as Step
from nsa.decode.views import View as View
from nsa.decode.views import replay_of as replay_of

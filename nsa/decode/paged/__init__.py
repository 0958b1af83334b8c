"""Keys and values in pages: ``allocator`` gives pages, ``rows`` says which row holds which,
``pools`` makes their tensors, ``cache`` is what layers take, and ``graph`` captures a step of the
largest batch.
"""

from nsa.decode.paged.allocator import OutOfPages as OutOfPages
from nsa.decode.paged.allocator import PageAllocator as PageAllocator
from nsa.decode.paged.cache import PagedCache as PagedCache
from nsa.decode.paged.cache import PagedLayer as PagedLayer
from nsa.decode.paged.graph import PagedGraph as PagedGraph
from nsa.decode.paged.pools import PageShape as PageShape
from nsa.decode.paged.rows import HeldPages as HeldPages

"""All options of one mount: frozen structs, their defaults, and the values that each may have.

``config.py`` fills them from mount.conf and ``-o`` words.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvfuse.errors import ConfigError
from kvfuse.sizes import GIB, KIB, MIB, format_size

SLOT_SIZE_MAX = 64 * MIB


def _size(least: int, most: int, step: int) -> Meta:
    text = f"a size from {format_size(least)} to {format_size(most)}, in steps of {format_size(step)}"
    return Meta(ge=least, le=most, multiple_of=step, description=text)


Bytes = Annotated[int, Meta(ge=1, le=1 << 62, description='a size such as "64GiB", or a number of bytes')]
BlockBytes = Annotated[int, Meta(ge=1, le=SLOT_SIZE_MAX, description='sizes such as "2MiB", of up to 64MiB')]
ChunkBytes = Annotated[int, _size(4 * KIB, SLOT_SIZE_MAX, 4 * KIB)]
SegmentBytes = Annotated[int, _size(MIB, 1 << 40, MIB)]
TierBytes = Annotated[int, Meta(ge=0, le=1 << 62, description='a size such as "1GiB"; 0: none')]
DiskBytes = Annotated[int, Meta(ge=16 * MIB, le=1 << 62, description='a size such as "100GiB", at least 16MiB')]
ScrubBytes = Annotated[int, Meta(ge=0, le=1 << 40, description='a size such as "10MiB"; 0: never')]
ReadAheadBytes = Annotated[int, Meta(ge=0, le=GIB, description='a size such as "1MiB"; 0 leaves the kernel\'s own')]
Seconds = Annotated[float, Meta(ge=0, le=1e9, description="a number of seconds, 0 or more")]
DeadlineSeconds = Annotated[float, Meta(ge=0.1, le=3600, description="a number of seconds, 0.1 to 3600")]
LeaseSeconds = Annotated[float, Meta(ge=2, le=3600, description="a number of seconds, 2 to 3600")]
Count = Annotated[int, Meta(ge=1, le=1 << 40, description="a whole number, 1 or more")]
PeerConnections = Annotated[int, Meta(ge=1, le=16, description="a whole number, 1 to 16")]
PairDepth = Annotated[int, Meta(ge=1, le=16384, description="a whole number, 1 to 16384")]
PairReads = Annotated[int, Meta(ge=1, le=255, description="a whole number, 1 to 255")]
PairTimeout = Annotated[int, Meta(ge=1, le=31, description="a whole number, 1 to 31")]
PairRetries = Annotated[int, Meta(ge=0, le=7, description="a whole number, 0 to 7")]
PairMtu = Annotated[int, Meta(ge=256, le=4096, multiple_of=256, description="256, 512, 1024, 2048 or 4096")]
TrafficClass = Annotated[int, Meta(ge=0, le=255, description="a whole number, 0 to 255")]
RdmaDevice = Annotated[
    str,
    Meta(
        pattern=r"^(\d{1,4}=)?[A-Za-z0-9_.-]{1,64}(:\d{1,3})?$",
        description='devices such as "mlx5_0", or "1=mlx5_0" for one NUMA node',
    ),
]
FileCount = Annotated[int, Meta(ge=0, le=1 << 62, description="a number of files, or 0 for any number")]
Readers = Annotated[int, Meta(ge=0, le=8, description="a number of threads up to 8")]
NiceValue = Annotated[int, Meta(ge=-20, le=19, description="a whole number, -20 to 19")]
RateBytes = Annotated[int, Meta(ge=0, le=1 << 62, description='a size such as "200MB"; 0: no limit')]
Node = Annotated[int, Meta(ge=0, le=1023, description="the number of a NUMA node of this host")]
Weight = Annotated[float, Meta(ge=0.01, le=100, description="a number from 0.01 to 100")]
TokenRate = Annotated[int, Meta(ge=0, le=1 << 62, description="tokens a second, or 0 where that is not known")]
Share = Annotated[float, Meta(gt=0, le=1, description="a share of the capacity, above 0 and up to 1")]
NamespaceKind = Annotated[
    Literal["files", "cache", "blocks"], Meta(description="'files', or 'blocks' (formerly 'cache')")
]
ObjectBytes = Annotated[int, _size(64 * KIB, SLOT_SIZE_MAX, 4 * KIB)]
ColdObjectBytes = Annotated[int, _size(MIB, GIB, MIB)]
Endpoint = Annotated[str, Meta(pattern=r"^https?://[^\s/,@]+$", description='URLs such as "http://10.0.0.1:2379"')]
RedisUrl = Annotated[
    str,
    Meta(
        pattern=r"^rediss?://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:\d{1,5})?(/\d{0,5})?$",
        description='a URL such as "redis://10.0.0.1:6379", with rediss:// for TLS',
    ),
]
BucketUrl = Annotated[
    str,
    Meta(pattern=r"^https?://[^\s/,@]+/?$", description='a URL such as "https://s3.example.com:9000", without keys'),
]
BucketName = Annotated[
    str,
    Meta(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", description="3 to 63 small letters, digits, dots and dashes"),
]
BucketPrefix = Annotated[
    str,
    Meta(
        pattern=r"^([A-Za-z0-9_.-]{1,60}/){0,8}$",
        description='folders such as "kvfuse/volume1/", with a slash at the end',
    ),
]
TraceUrl = Annotated[
    str, Meta(pattern=r"^https?://[^\s@]+$", description='a URL such as "http://10.0.0.1:4318/v1/traces"')
]
TraceRatio = Annotated[float, Meta(ge=0, le=1, description="a share from 0 to 1")]
Shards = Annotated[int, Meta(ge=1, le=4096, description="a whole number, 1 to 4096")]
VolumeName = Annotated[
    str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99})?$", description="up to 100 letters, digits and ._-")
]
KeyPrefix = Annotated[
    str, Meta(pattern=r"^[\x21-\x7e]{0,200}$", description="up to 200 printable characters, no spaces")
]
Word = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,200}$", description="printable characters, no spaces")]
_HOST = r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])"
_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3})"
ListenAddress = Annotated[
    str,
    Meta(
        pattern=f"^{_HOST}:{_PORT}$",
        description='HOST:PORT such as "127.0.0.1:9567", an IPv6 address in brackets, the port from 1 to 65535',
    ),
]
HttpAddress = Annotated[
    str,
    Meta(
        pattern=rf"^({_HOST}:{_PORT}|unix:/[^\0]{{1,100}})$",
        description='HOST:PORT such as "127.0.0.1:8080", or "unix:/run/kvfuse.sock"',
    ),
]
HttpOwner = Annotated[
    str, Meta(pattern=r"^\d{1,10}:\d{1,10}$", description='numbers of a user and a group such as "1000:1000"')
]
PeerAddress = Annotated[
    str,
    Meta(
        pattern=f"^{_HOST}(:{_PORT})?$",
        description='HOST or HOST:PORT such as "10.0.0.7:7650", an IPv6 address in brackets',
    ),
]
DevicePath = Annotated[
    str, Meta(pattern=r"^/[^\0]+$", description='absolute paths such as "/dev/disk/by-id/nvme-uuid.0"')
]
DeviceDomain = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9._-]{1,36}$", description='1 to 36 letters, digits, ".", "_" and "-"')
]
DeviceWeight = Annotated[int, Meta(ge=1, le=1_000_000, description="whole numbers from 1 to 1000000")]
KernelFlag = Literal["dev", "nodev", "suid", "nosuid", "exec", "noexec", "sync", "dirsync"]

SIZES = (
    Bytes,
    BlockBytes,
    ChunkBytes,
    SegmentBytes,
    ObjectBytes,
    ColdObjectBytes,
    TierBytes,
    ReadAheadBytes,
    ScrubBytes,
    DiskBytes,
    RateBytes,
)


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the tables of mount.conf."""


class _Engine(_Section, frozen=True, tag_field="engine"):
    """Base of tables with an engine each: the key ``engine`` says which of them it is."""

    @property
    def engine(self) -> str:
        return str(self.__struct_config__.tag)


class VolumeOptions(_Section, frozen=True):
    """A volume. All but ``path`` and ``name`` are set when it is made and kept in it; `exact_sizes` may get more."""

    path: Path | None = None
    """the volume's folder; None: SOURCE, or no folder is needed"""
    name: VolumeName = ""
    """name of the volume in a shared record store"""
    capacity: Bytes | None = None
    """bytes promised to users; None: the smaller of 64 GiB and half of the free disk"""
    slab_size: Bytes | None = None
    """bytes of a slab; None: chosen from the capacity"""
    segment_size: SegmentBytes = GIB
    chunk_size: ChunkBytes = 4 * MIB
    """bytes of a large file that one chunk covers"""
    exact_sizes: tuple[BlockBytes, ...] = ()
    """block sizes that get a size class of their own"""
    metadata_size: Bytes | None = None
    """bytes of names, inodes and attributes; None: a sixteenth of the capacity, at least 32 MiB"""


class _RecordEngine(_Engine, frozen=True):
    """Base of the record engines, which store names and inodes."""

    commit_delay: Seconds = 0.0
    """seconds added to every commit, to simulate a store that is far away"""


class LmdbOptions(_RecordEngine, frozen=True, tag="lmdb"):
    """One file, of one host."""

    path: Path | None = None
    """None: ``records`` in the volume's folder"""


class EtcdOptions(_RecordEngine, frozen=True, tag="etcd"):
    """A cluster that many hosts reach."""

    endpoints: tuple[Endpoint, ...] = ("http://127.0.0.1:2379",)
    """its members"""
    prefix: KeyPrefix = "/kvfuse/"
    """keys of a volume begin with this, its name and a slash"""
    user: Word | None = None
    password_file: Path | None = None
    """its first line is the password"""
    ca_file: Path | None = None
    """the authority for https; None: those that the system trusts"""
    cert_file: Path | None = None
    """this client's certificate"""
    key_file: Path | None = None
    deadline: DeadlineSeconds = 5.0
    """seconds for a call"""
    operations_max: Count = 128
    """the server's --max-txn-ops"""
    request_size_max: Bytes = 3 * MIB // 2
    """the server's --max-request-bytes"""


class FileOptions(_Engine, frozen=True, tag="file"):
    """Bytes in the files of a folder."""

    path: Path | None = None
    """None: ``segments`` in the volume's folder"""
    direct: bool = False
    """O_DIRECT instead of the page cache"""


class RadosOptions(_Engine, frozen=True, tag="rados"):
    """Bytes in the objects of a pool of Ceph."""

    conf_file: Path = Path("/etc/ceph/ceph.conf")
    pool: Word | None = None
    namespace: Word | None = None
    """None: the volume's name"""
    user: Word = "admin"
    """of cephx, without "client.\""""
    keyring: Path | None = None
    """None: as the configuration file says"""
    object_size: ObjectBytes = 4 * MIB
    """bytes of one RADOS object"""
    deadline: DeadlineSeconds = 5.0
    """seconds for a call"""
    in_flight_max: Count = 64
    """objects of one batch under way"""
    hedge_delay: Seconds = 0.5
    """seconds after which a late read is sent to another replica, too; 0: never"""


class BlockOptions(_Engine, frozen=True, tag="block"):
    """Bytes on block devices that all hosts of the volume see."""

    devices: tuple[DevicePath, ...] = ()
    """all devices, partitions or files of the volume, in any order"""
    weights: tuple[DeviceWeight, ...] = ()
    """one for each device, when the volume is made: their parts of its segments; (): as they have room"""
    domains: tuple[DeviceDomain, ...] = ()
    """one for each device, when the volume is made: what fails together; (): each device fails alone"""
    deadline: DeadlineSeconds = 5.0
    """seconds for a call"""
    quarantine: Seconds = 120.0
    """seconds for which nobody writes to slabs of a host that is gone: its last writes may still be under way"""
    reservations: bool = False
    """devices refuse further writes of such a host, where they have persistent reservations"""


class BucketOptions(_Engine, frozen=True):
    """Base of what has its bytes in a bucket of an S3 server."""

    endpoint: BucketUrl | None = None
    """None: Amazon's, of the region"""
    bucket: BucketName | None = None
    prefix: BucketPrefix | None = None
    """of all objects' names; None: the name of the volume's folder"""
    region: Word = "us-east-1"
    credentials_file: Path | None = None
    """as ~/.aws/credentials; None: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or the machine's
    role"""
    ca_file: Path | None = None
    """an authority for https beside those that the system trusts"""
    path_style: bool = True
    """the bucket's name is in the path of the URL, not in the host's name"""


class S3Options(BucketOptions, frozen=True, tag="s3"):
    """Bytes in the objects of a bucket."""

    object_size: ObjectBytes = 8 * MIB
    """bytes of one object: a write of a part of one reads it and puts it whole"""
    deadline: DeadlineSeconds = 10.0
    """seconds for a request"""
    in_flight_max: Count = 16
    """requests under way"""


class NoColdOptions(_Engine, frozen=True, tag="none"):
    """Blocks that leave the volume are gone."""


class ColdBucketOptions(BucketOptions, frozen=True, tag="s3"):
    """Blocks that leave the volume go to a bucket, and come back when they are asked for."""

    capacity: Bytes | None = None
    """bytes of objects, at most"""
    object_size: ColdObjectBytes = 32 * MIB
    """bytes of one object, about"""
    rate: RateBytes = 0
    """bytes a second that go to the bucket; 0: any number"""
    deadline: DeadlineSeconds = 2.0
    """seconds for a read, after which a block counts as absent"""
    put_deadline: DeadlineSeconds = 60.0
    """seconds for a put of an object, and for all that nobody waits for"""
    in_flight_max: Count = 16
    """reads under way"""


class AutoIndexOptions(_Engine, frozen=True, tag="auto"):
    """omap where segments are in rados (in a pool that has omaps), else etcd where records are there, else none."""


class EtcdIndexOptions(_Engine, frozen=True, tag="etcd"):
    """Beside the records."""


class OmapIndexOptions(_Engine, frozen=True, tag="omap"):
    """Beside the segments in rados."""

    shards: Shards = 16
    """objects that the entries are spread over; the same on all hosts"""


class RedisIndexOptions(_Engine, frozen=True, tag="redis"):
    """A server that all hosts reach, or its compatible."""

    url: RedisUrl | None = None
    user: Word | None = None
    """None: the server's default"""
    password_file: Path | None = None
    """its first line is the password"""
    ca_file: Path | None = None
    """the authority for rediss; None: those that the system trusts"""
    deadline: DeadlineSeconds = 1.0
    """seconds for a call"""


class ClientOptions(_Section, frozen=True):
    """One host of several that share a volume."""

    lease: LeaseSeconds = 10.0
    """seconds after which others take over from a client that does not renew its lease"""


class PublishOptions(_Section, frozen=True):
    """When names and content reach the record store."""

    mode: Literal["relaxed", "strict"] | None = None
    """None: strict where the record store is shared, else relaxed"""
    window: Seconds = 0.05
    """seconds that bytes of a relaxed change may wait; where changes do not outlive the daemon, its names, too"""
    interval: Seconds = 5.0
    """seconds in which what was stored is made to survive a loss of power, where nobody asks for it before"""


class CacheOptions(_Section, frozen=True):
    """What the daemon may keep in memory, and on a disk of this host."""

    staging_size: Bytes = 256 * MIB
    """bytes of files that are not written yet, at most; see also `machine_memory.dirty_size_max`"""
    nodes: Count = 10_000
    """inodes kept decoded"""
    tier_size: TierBytes = GIB
    """bytes of shared memory for blocks that clients may map; 0: none"""
    tier_hugepages: bool = False
    """it asks the kernel for huge pages"""
    tier_node: Node | None = None
    """the NUMA node that it takes memory from, if that has any; None: that of whoever touches a page first"""
    disk_path: Path | None = None
    """a folder or device of this host for copies of what was read from segments that many hosts share; None: nowhere"""
    disk_size: DiskBytes | None = None
    """bytes of that folder, preallocated; None: all of a device"""
    disk_keep: Literal["reads", "all"] = "reads"
    """all: also what this host stores"""
    disk_compression: Literal["none", "zstd"] = "none"
    """of copies that take a smaller slot by it"""


def meant_kind(kind: str) -> str:
    """What a user means by the kind of a namespace: "cache" is the former name of "blocks"."""
    return "blocks" if kind == "cache" else kind


class NamespaceOptions(_Section, frozen=True):
    """The root's namespace. None: as it is stored in the volume. A volume that is made stores those that are given."""

    kind: NamespaceKind | None = None
    eviction: Literal["chain", "lru", "lfu", "fifo", "arc", "s3fifo"] | None = None
    admission: Literal["adaptive", "all", "second-touch"] | None = None
    ttl: Seconds | None = None
    """seconds after which a block expires; 0: never"""
    blocks: FileCount | None = None
    """files that it may hold; 0: any number"""
    high_water: Share | None = None
    low_water: Share | None = None
    """shares of the capacity at which eviction begins, and ends"""
    bandwidth: RateBytes | None = None
    """bytes a second that callers read and write; 0: any number"""
    iops: FileCount | None = None
    """reads and writes a second; 0: any number"""
    burst: RateBytes | None = None
    """bytes that may be ahead of it; 0: a twentieth of a second's"""
    weight: Weight | None = None
    """its share of memory for writes where several namespaces wait for that"""
    soft_pin: bool | None = None
    """its blocks go after those of other caches"""
    tiers: Literal["all", "dram", "disk", "remote"] | None = None
    """tiers of a host that may get copies of its blocks"""
    cold: Literal["none", "used", "all"] | None = None
    """which blocks go to the cold tier when they leave the volume"""
    compression: Literal["none", "zstd"] | None = None
    """of whole chunks, where a smaller slot holds them then"""
    recompute_speed: TokenRate | None = None
    """tokens a second that an engine computes; 0: look-ups do not compare"""
    token_size: TierBytes | None = None
    """bytes of blocks that one token has"""

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not None, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class MountOptions(_Section, frozen=True):
    """How the kernel sees the mount. Timeouts in seconds."""

    entry_timeout: Seconds = 60.0
    attr_timeout: Seconds = 60.0
    negative_timeout: Seconds = 1.0
    read_ahead: ReadAheadBytes = MIB
    allow_other: bool = False
    """users but the one who mounted it may come in"""
    read_only: bool = False
    export: bool = False
    """an NFS server exports the mount: files are found by their numbers, too"""
    atime: Literal["relatime", "strictatime", "noatime"] = "relatime"
    """which reads move access times, as in mount(8)"""
    diratime: bool = True
    """also those of directories"""
    default_permissions: bool | None = None
    """the kernel checks who may do what, for which it asks about a folder after each change there; None: where anybody
    but root may come in"""
    keep_awake: bool = True
    """keep idle processors awake while requests follow each other, if the daemon may"""
    readers: Readers = 2
    """threads that read the kernel's requests, and answer in C what is asked most of blocks; 0: Python answers all"""
    nice: NiceValue = 0
    """nice value of the daemon's threads, if it may have that; 0: as it was started"""
    outlive: bool | None = None
    """the mount goes on when its daemon is killed, crashes or is upgraded: a small process holds it meanwhile; None:
    where all that takes is there"""
    outlive_size: TierBytes = 64 * MIB
    """bytes of shared memory for bytes that were written and not stored, so that the next daemon has them; 0: neither
    they nor names are kept. One host's volumes"""
    standby: bool | None = None
    """another process forks daemons, which begin at once when one was killed: 16 MB of memory for half a second; None:
    where the memory for it is there"""
    flags: tuple[KernelFlag, ...] = ()
    """further flags for the kernel, as in mount(8)"""

    @property
    def access_times(self) -> Literal["relatime", "strictatime", "noatime"]:
        """``atime``, where anything may be stored."""
        return "noatime" if self.read_only else self.atime


class UsrbioOptions(_Section, frozen=True):
    """Rings: shared memory between an engine's process and the daemon."""

    enabled: bool = True
    """clients may connect to ``.kvfuse/control.sock`` in the mount"""
    user_connections: Count = 256
    """most connections of one user; like the limits below, not for peers that could end the daemon anyway"""
    user_rings: Count = 256
    user_ring_size: Bytes = 4 * GIB
    """bytes of rings: their queues, and the areas for keys and results"""
    user_files: Count = 65_536
    """files and namespaces"""
    user_followers: Count = 16
    """connections that follow the blocks of a folder"""
    user_iovs: Count = 16_384
    """registered pieces of clients' memory; the daemon needs two descriptors for each"""
    user_iov_size: Bytes | None = None
    """bytes of clients' memory that rings may use; what two clients register counts twice; None: 128 times the memory
    that the daemon may have, a quarter of which is then taken by its page tables"""
    user_charged_size: Bytes | None = None
    """bytes of clients' memory that was absent until the daemon wrote to it; None: an eighth of the memory that the
    daemon may have"""


class PeerOptions(_Section, frozen=True):
    """Hosts of a shared volume that read from each other."""

    listen: ListenAddress | None = None
    """HOST:PORT where other hosts may read what this one has in its tiers; None: nowhere"""
    advertise: tuple[PeerAddress, ...] = ()
    """HOST or HOST:PORT by which others reach it, one for each network card; empty: as ``listen`` says, or this host's
    name"""
    reads: bool = True
    """hosts that listen are asked before the segments"""
    connections: PeerConnections = 2
    """to each other host"""
    deadline: DeadlineSeconds = 1.0
    """seconds for a read, and without a byte"""
    in_flight: Bytes = 64 * MIB
    """bytes that one other host may have on their way to it, over TCP"""
    transport: Literal["auto", "tcp", "rdma"] = "auto"
    """how bytes come from others: rdma and auto: by RDMA where both hosts have a device for it"""
    rdma_devices: tuple[RdmaDevice, ...] = ()
    """DEVICE, or NODE=DEVICE for a NUMA node; empty: those that are nearest to the daemon's"""
    rdma_blocks: Literal["large", "small"] = "large"
    """for which blocks queue pairs are made; each of the settings below replaces one of that"""
    rdma_depth: PairDepth | None = None
    rdma_parallel_reads: PairReads | None = None
    rdma_timeout: PairTimeout | None = None
    """4.096 us * 2 ** timeout until a packet is sent again"""
    rdma_retries: PairRetries | None = None
    rdma_mtu: PairMtu | None = None
    rdma_traffic_class: TrafficClass | None = None


class ScrubOptions(_Section, frozen=True):
    """Verifying, in the background, all that is stored."""

    rate: ScrubBytes = 0
    """bytes a second; 0: never"""


class MetricsOptions(_Section, frozen=True):
    """What the daemon tells a metrics server (Prometheus) that asks it."""

    listen: ListenAddress | None = None
    """HOST:PORT where it answers ``GET /metrics``; None: nowhere"""


class HttpOptions(_Section, frozen=True):
    """Files and blocks over HTTP."""

    listen: HttpAddress | None = None
    """HOST:PORT, or unix:PATH of a socket, where it answers; None: nowhere"""
    users: Path | None = None
    """a file with the users that may come over TCP, and the hashes of their tokens"""
    certificate: Path | None = None
    """of this server, for https; None: plain HTTP"""
    key: Path | None = None
    anonymous: HttpOwner | None = None
    """UID:GID of whoever comes without a token, on a loopback address alone; None: nobody does"""
    clients: Count = 256
    """connections of all of them"""
    user_requests: Count = 64
    """requests of one user at once"""
    followers: Count = 16
    """streams of events of one user"""
    body_memory: Bytes = 256 * MIB
    """bytes of bodies that are in memory, for all users"""


class TraceOptions(_Section, frozen=True):
    """Spans of requests, for a collector of OpenTelemetry."""

    endpoint: TraceUrl | None = None
    """URL for OTLP over HTTP; None: nothing is traced"""
    ratio: TraceRatio = 0.01
    """share of requests that are traced"""


class LogOptions(_Section, frozen=True):
    """The daemon's log: how much, and where."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    """json: an object a line"""
    journal: bool | None = None
    """lines go to systemd's journal; None: where stderr is the journal, lines there say their priority"""
    file: Path | None = None
    """None: ``Options.log_file`` for a background daemon, stderr in the foreground"""


class Options(_Section, frozen=True):
    """All options of one mount."""

    volume: VolumeOptions = msgspec.field(default_factory=VolumeOptions)
    records: LmdbOptions | EtcdOptions = msgspec.field(default_factory=LmdbOptions)
    segments: FileOptions | RadosOptions | BlockOptions | S3Options = msgspec.field(default_factory=FileOptions)
    index: AutoIndexOptions | EtcdIndexOptions | OmapIndexOptions | RedisIndexOptions = msgspec.field(
        default_factory=AutoIndexOptions
    )
    client: ClientOptions = msgspec.field(default_factory=ClientOptions)
    publish: PublishOptions = msgspec.field(default_factory=PublishOptions)
    cache: CacheOptions = msgspec.field(default_factory=CacheOptions)
    cold: NoColdOptions | ColdBucketOptions = msgspec.field(default_factory=NoColdOptions)
    namespace: NamespaceOptions = msgspec.field(default_factory=NamespaceOptions)
    mount: MountOptions = msgspec.field(default_factory=MountOptions)
    usrbio: UsrbioOptions = msgspec.field(default_factory=UsrbioOptions)
    peer: PeerOptions = msgspec.field(default_factory=PeerOptions)
    scrub: ScrubOptions = msgspec.field(default_factory=ScrubOptions)
    metrics: MetricsOptions = msgspec.field(default_factory=MetricsOptions)
    http: HttpOptions = msgspec.field(default_factory=HttpOptions)
    trace: TraceOptions = msgspec.field(default_factory=TraceOptions)
    log: LogOptions = msgspec.field(default_factory=LogOptions)

    @property
    def is_shared(self) -> bool:
        """The record store can be shared by many hosts: the volume has a name instead of a folder."""
        return isinstance(self.records, EtcdOptions)

    @property
    def has_segment_files(self) -> bool:
        return isinstance(self.segments, FileOptions)

    @property
    def has_devices(self) -> bool:
        """Its segments are on block devices, which have to be labelled for it."""
        return isinstance(self.segments, BlockOptions)

    @property
    def title(self) -> str:
        """The volume in messages: its folder, or engine and key prefix. ConfigError if it is not named."""
        return f"{self.records.engine}:{self.key_prefix}" if self.is_shared else str(self.volume_path)

    @property
    def key_prefix(self) -> str:
        """Prefix of all keys of a shared volume's records. ConfigError if it has no name."""
        if not self.volume.name:
            raise ConfigError("volume.name is not set: records.engine 'etcd' keeps many volumes, name one")
        assert isinstance(self.records, EtcdOptions)
        return f"{self.records.prefix}{self.volume.name}/"

    def index_prefix(self, volume_id: bytes) -> str:
        """Prefix of all keys of a shared volume's index: not below what record stores watch.

        With a part of the volume's id: of a volume that is made again there may be entries of higher sequences.
        """
        return f"{self.key_prefix}index/{volume_id.hex()[:8]}/"

    @property
    def volume_path(self) -> Path:
        """The volume's folder. ConfigError where neither mount.conf nor the command line names one."""
        if self.volume.path is None:
            raise ConfigError("volume.path is not set: name the volume's folder in mount.conf or as SOURCE")
        return self.volume.path

    @property
    def records_path(self) -> Path:
        """ConfigError where lmdb cannot take its name."""
        assert isinstance(self.records, LmdbOptions)
        path = self.records.path or self.volume_path / "records"
        if any("\ud800" <= character <= "\udfff" for character in os.fspath(path)):
            raise ConfigError(f"{path}: the names of the records' folders are to be UTF-8: rename the one that is not")
        return path

    @property
    def segments_path(self) -> Path:
        assert isinstance(self.segments, FileOptions)
        return self.segments.path or self.volume_path / "segments"

    @property
    def log_file(self) -> Path:
        """Where a background daemon logs: in the folder of the volume, where there is one that it may write."""
        if self.log.file is not None:
            return self.log.file
        if not self.is_shared and not is_on_read_only(self.volume_path):
            return self.volume_path / "log"
        name = self.volume.name if self.is_shared else self.volume_path.name
        if os.geteuid() == 0:
            return Path(f"/var/log/kvfuse-{name}.log")
        return Path.home() / ".local" / "state" / "kvfuse" / f"{name}.log"

    @property
    def publish_mode(self) -> Literal["relaxed", "strict"]:
        return self.publish.mode or ("strict" if self.is_shared else "relaxed")


def is_on_read_only(path: Path) -> bool:
    """``path`` is in a file system that is mounted read-only."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False

"""A ResNet-18 or CifarNet on Fashion-MNIST, with augmentation, evaluation and resume.

    torchrun --nproc-per-node 2 examples/fashion_resnet.py --data DIR --checkpoint run.pt

DIR holds the four .gz files of https://github.com/zalandoresearch/fashion-mnist. You can stop the
run at any time and start it again with more or fewer workers. It continues inside the epoch.

``--net cifarnet`` is the network of LB-BSP (Chen et al., SoCC 2020), which trains it on CIFAR-10.
Fashion-MNIST stands in for that data set here, as for those of the other papers.
"""

import argparse
import gzip
import os
import struct
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import evenstride

DEFAULT = Path(os.environ.get("EVENSTRIDE_DATA", "data"), "fashion-mnist")


def read_idx(path: Path) -> Tensor:
    """Return the bytes of a gzipped IDX file as a tensor."""
    if not path.is_file():
        raise SystemExit(f"{path} is missing; pass --data DIR with Fashion-MNIST's four .gz files")
    raw = bytearray(gzip.decompress(path.read_bytes()))
    dimensions = raw[3]
    shape = struct.unpack_from(f">{dimensions}I", raw, 4)
    return torch.frombuffer(raw, dtype=torch.uint8, offset=4 + 4 * dimensions).view(shape)


class Fashion(Dataset[tuple[Tensor, Tensor]]):
    """Fashion-MNIST. With ``augment``, each image is randomly cropped and flipped."""

    def __init__(self, folder: Path, part: str, limit: int | None, augment: bool) -> None:
        self.images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")[:limit]
        self.labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")[:limit].long()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = (self.images[index].float() / 255 - 0.286).unsqueeze(0) / 0.353
        if self.augment:
            # evenstride seeds each sample by (seed, epoch, index), so any worker draws this crop.
            height, width = image.shape[1:]
            top, left = torch.randint(5, (2,)).tolist()
            image = F.pad(image, (2, 2, 2, 2))[:, top : top + height, left : left + width]
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
        return image, self.labels[index]


def conv(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    """Return a convolution with group norm.

    With batch norm, a sample's gradient would depend on the other samples of its mini-batch.
    Group norm normalises each sample alone, so the split does not change the gradient.
    """
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(4, outputs))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            conv(inputs, outputs, stride), nn.ReLU(), conv(outputs, outputs)
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv(inputs, outputs, stride, size=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x))


def resnet18(width: int, classes: int = 10) -> nn.Module:
    """Return a ResNet-18 for small grey images. The standard width is 64."""
    blocks, inputs = [], width
    for stage in range(4):
        outputs = width * 2**stage
        blocks += [Block(inputs, outputs, 1 if stage == 0 else 2), Block(outputs, outputs, 1)]
        inputs = outputs
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    return nn.Sequential(conv(1, width), nn.ReLU(), *blocks, *head)


def cifarnet(width: int, classes: int = 10) -> nn.Module:
    """Return a CifarNet for small grey images. The standard width is 64.

    It has no dropout, whose random numbers would depend on the split.
    """

    def block(inputs: int, *last: nn.Module) -> tuple[nn.Module, ...]:
        return nn.Conv2d(inputs, width, 5, padding=2), nn.ReLU(), *last

    pool, norm = nn.MaxPool2d(2), nn.LocalResponseNorm(9, alpha=0.001, beta=0.75)
    head = (nn.Flatten(), nn.LazyLinear(6 * width), nn.ReLU(), nn.Linear(6 * width, 3 * width))
    return nn.Sequential(
        *block(1, pool, norm),
        *block(width, norm, pool),
        *head,
        nn.ReLU(),
        nn.Linear(3 * width, classes),
    )


NETS = {"resnet18": resnet18, "cifarnet": cifarnet}


@torch.no_grad()
def evaluate(stride: evenstride.Stride, net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return loss and accuracy over the images of all workers, each counted once."""
    net.eval()
    loss, right, images = 0.0, 0, 0
    for x, y in loader:
        scores = net(x)
        loss += F.cross_entropy(scores, y, reduction="sum").item()
        right += int((scores.argmax(1) == y).sum())
        images += len(y)
    net.train()
    return stride.mean(loss, images), stride.mean(right, images)


def save(path: Path, **parts: Stateful) -> None:
    """Replace the checkpoint atomically, so that it is complete even if the run is killed."""
    fresh = path.with_suffix(".tmp")
    torch.save({name: part.state_dict() for name, part in parts.items()}, fresh)
    fresh.replace(path)


def load(path: Path, **parts: Stateful) -> None:
    """Restore a checkpoint. Every rank reads the same file."""
    for name, state in torch.load(path).items():
        parts[name].load_state_dict(state)


def main(args: argparse.Namespace) -> None:
    train_set = Fashion(args.data, "train", args.limit, augment=True)
    test_set = Fashion(args.data, "t10k", args.limit, augment=False)
    dist.init_process_group()
    leader = dist.get_rank() == 0
    saves = leader and args.checkpoint
    torch.manual_seed(0)
    net = NETS[args.net](args.width)
    net(train_set[0][0].unsqueeze(0))  # a lazy layer takes its size from its first image
    optimizer = torch.optim.SGD(
        net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    stride = evenstride.Stride(args.global_batch)
    parts: dict[str, Stateful] = {"model": net, "optimizer": optimizer, "stride": stride}
    if args.checkpoint and args.checkpoint.exists():
        load(args.checkpoint, **parts)
        if leader:
            print(f"resuming in epoch {stride.epoch} after {stride.step} steps")

    loader = stride.loader(train_set, num_workers=args.num_workers)
    test_loader = stride.loader(test_set, train=False, num_workers=args.num_workers)
    model = stride.watch(DistributedDataParallel(net))

    for epoch in range(stride.epoch, args.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            stride.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            if saves and stride.step % args.save_every == 0:
                save(args.checkpoint, **parts)
        if saves:
            save(args.checkpoint, **parts)
        if stride.epoch == epoch:  # EVENSTRIDE_MAX_STEPS, which `evenstride lab` sets, ended it
            break
        # Without DDP: the workers evaluate different numbers of batches.
        tested = evaluate(stride, net, test_loader)
        if leader:
            print("epoch {}: test loss {:.4f}, accuracy {:.2%}".format(epoch, *tested), flush=True)
    if leader:
        print(stride.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=DEFAULT, help="folder of Fashion-MNIST")
    parser.add_argument("--checkpoint", type=Path, help="file to save to and resume from")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--net", choices=NETS, default="resnet18")
    parser.add_argument("--width", type=int, default=16, help="the standard is 64")
    parser.add_argument("--limit", type=int, help="use only the first images of each set")
    parser.add_argument("--num-workers", type=int, default=2)
    main(parser.parse_args())

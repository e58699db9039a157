// What device.cpp and group.cpp share.

#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace virtual_device {

// A CPU tensor over the memory of a tensor of the device.
at::Tensor on_cpu(const at::Tensor& tensor);

void bind_group(pybind11::module_& m);

} // namespace virtual_device

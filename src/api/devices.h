// What machine this is, and which of its devices a call runs on. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/kernel.h"

namespace ffpa {

int device_count(int type);
// Fills *info but for struct_size; index is in [0, device_count(type)).
Status device_at(int type, int index, ffpa_device_info* info);

// Makes the device of a tensor this thread's current one while it lives, then the previous one again: launches, function
// attributes and the null stream mean the current device. Nothing to do in host memory, or where it is current already.
class CurrentDevice {
 public:
  explicit CurrentDevice(const ffpa_tensor& on);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  const Status& status() const { return status_; }

 private:
  Status status_;
  int previous_ = -1;  // -1: nothing to restore
};

}  // namespace ffpa

// What machine this is. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/kernel.h"

namespace ffpa {

int device_count(int type);
// Fills *info but for struct_size; index is in [0, device_count(type)).
Status device_at(int type, int index, ffpa_device_info* info);

}  // namespace ffpa

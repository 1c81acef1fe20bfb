// What makes the host wait for a device, counted while somebody counts.
#pragma once
#include <cstddef>

namespace kvtune {

enum class Wait : size_t { number, places, comparison, blocking_copy, pageable_copy, event, cuda, count };

// One more, where this thread, or the one whose backward it runs, is counting.
void note_wait(Wait wait);

}  // namespace kvtune

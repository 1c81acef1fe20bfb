// What makes the host wait for a device, noted while somebody takes notes.
#pragma once

namespace kvtune {

// A literal, where this thread, or the one whose backward it runs, takes notes.
void note_wait(const char* what);

}  // namespace kvtune

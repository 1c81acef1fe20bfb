// libtorch's wheels have Gloo's code and not its headers. These five say as much of it as `ProcessGroupGloo.hpp` asks for; where a
// libtorch has Gloo's own, those come first.
#pragma once

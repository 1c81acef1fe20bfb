// Nothing of it is used: see algorithm.h.
#pragma once

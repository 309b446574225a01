package loop

import (
	"context"
	"time"
)

// SetPause has a test decide what happens between two tries to detach.
func (k *Kernel) SetPause(pause func(context.Context, time.Duration) error) { k.pause = pause }

// SetFree has a test choose which device is tried; next makes one.
func (k *Kernel) SetFree(free func(next func() (int, error)) (int, error)) {
	k.free = func(c control, refused map[int]bool) (int, error) {
		return free(func() (int, error) { return c.free(refused) })
	}
}

// NoDevice maps the errors of /dev/loop-control.
func NoDevice(err error) error { return noDevice("LOOP_CTL_ADD", err) }

// Attempts bounds how many devices Attach tries.
const Attempts = attempts

// UsableBlock chooses the block for an alignment.
func UsableBlock(align int64) int64 { return usableBlock(align) }

// DeviceBlock is the block where the filesystem does not report it.
func DeviceBlock(dev uint64) int64 { return deviceBlock(dev) }

// AskAll asks devices.
var AskAll = askAll

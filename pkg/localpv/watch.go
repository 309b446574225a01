package localpv

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/go-logr/logr"
)

// quiet is how long nothing happens before a change is reported: udev makes many links of one device.
const quiet = 200 * time.Millisecond

// longestQuiet is how long that is waited for where changes go on and on.
const longestQuiet = time.Second

type watcher struct {
	log     logr.Logger
	changed func()

	mu       sync.Mutex
	inotify  *fsnotify.Watcher
	watching map[string]bool
}

func newWatcher(log logr.Logger, changed func()) (*watcher, error) {
	inotify, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	return &watcher{log: log, changed: changed, inotify: inotify, watching: make(map[string]bool)}, nil
}

// watch has these directories watched, and no others. One that cannot be watched is left to polling.
func (w *watcher) watch(directories []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	wanted := make(map[string]bool)
	for _, dir := range directories {
		dir = filepath.Clean(dir)
		wanted[dir] = true
		// Again each time: a directory that was removed and made anew is another one.
		if err := w.inotify.Add(dir); err == nil {
			w.watching[dir] = true
		} else if !errors.Is(err, fs.ErrNotExist) {
			w.log.Error(err, "Failed to watch for new devices; polling finds them", "directory", dir)
		}
	}
	for dir := range w.watching {
		if !wanted[dir] {
			_ = w.inotify.Remove(dir) // it may be gone
			delete(w.watching, dir)
		}
	}
}

// Start reports until the context ends.
func (w *watcher) Start(ctx context.Context) error {
	defer func() { _ = w.inotify.Close() }()
	timer := time.NewTimer(0)
	var first time.Time // of the changes that are not reported
	wait := func() {
		if first.IsZero() {
			first = time.Now()
		}
		timer.Reset(min(quiet, longestQuiet-time.Since(first)))
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-w.inotify.Events:
			if e.Op != fsnotify.Chmod && e.Op != fsnotify.Write {
				wait()
			}
		case err := <-w.inotify.Errors:
			w.log.Error(err, "Changes of devices were missed")
			wait()
		case <-timer.C:
			first = time.Time{}
			w.changed()
		}
	}
}

// nearest is the directory itself, or what there is of the way to it.
func nearest(dir string) string {
	for dir = filepath.Clean(dir); dir != "/"; dir = filepath.Dir(dir) {
		if found, err := filepath.EvalSymlinks(dir); err == nil {
			return found
		}
	}
	return dir
}

package main

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

//go:embed page
var page embed.FS

const width = 1400 // of the picture, in pixels

// outcome is what the page says when it is done.
type outcome struct {
	Height int      `json:"height"` // of the dashboard, in pixels
	Empty  []string `json:"empty"`  // panels without data
	Errors []string `json:"errors"`
}

// photograph draws the dashboard from what Prometheus has of that time.
func photograph(ctx context.Context, o order, prometheus string, from, to time.Time) (err error) {
	outcomes := make(chan outcome, 8)
	address, stop, err := servePage(ctx, o, outcomes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	query := url.Values{
		"prometheus": {"http://" + prometheus},
		"from":       {strconv.FormatInt(from.Unix(), 10)},
		"to":         {strconv.FormatInt(to.Unix(), 10)},
	}
	at := "http://" + address + "/?" + query.Encode()
	dir, err := os.MkdirTemp("", "chromium-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	picture := filepath.Join(dir, "dashboard.png")
	// The first time tells how high it is.
	first, err := browse(ctx, at, dir, picture, 1000, outcomes)
	if err != nil {
		return err
	}
	if _, err := browse(ctx, at, dir, picture, first.Height, outcomes); err != nil {
		return err
	}
	if err := reduce(picture, o.out); err != nil {
		return err
	}
	fmt.Printf("%s is drawn. Panels without data: %s\n", o.out, strings.Join(first.Empty, ", "))
	return nil
}

// servePage serves the page and the dashboard, and takes the page's outcomes.
func servePage(ctx context.Context, o order, outcomes chan<- outcome) (address string, stop func() error, err error) {
	files, err := fs.Sub(page, "page")
	if err != nil {
		return "", nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(files))
	mux.HandleFunc("GET /dashboard.json", func(w http.ResponseWriter, r *http.Request) {
		http.ServeFile(w, r, filepath.Join(o.monitoring, "dashboard.json"))
	})
	mux.HandleFunc("POST /outcome", func(w http.ResponseWriter, r *http.Request) {
		var out outcome
		if err := json.NewDecoder(r.Body).Decode(&out); err != nil {
			out.Errors = []string{err.Error()}
		}
		outcomes <- out
		w.WriteHeader(http.StatusNoContent)
	})
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	return listener.Addr().String(), func() error {
		err := server.Close()
		if e := <-served; !errors.Is(e, http.ErrServerClosed) {
			err = errors.Join(err, e)
		}
		return err
	}, nil
}

// browse has Chromium draw the page.
func browse(ctx context.Context, at, profile, picture string, height int, outcomes <-chan outcome) (outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
		"--user-data-dir="+profile, "--virtual-time-budget=30000",
		fmt.Sprintf("--window-size=%d,%d", width, height), "--screenshot="+picture, at)
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	output, err := command.CombinedOutput()
	if err != nil {
		return outcome{}, fmt.Errorf("run chromium: %w\n%s", err, output)
	}
	select {
	case out := <-outcomes:
		if len(out.Errors) > 0 {
			return out, errors.New("the page: " + strings.Join(out.Errors, "\n"))
		}
		return out, nil
	default:
		return outcome{}, fmt.Errorf("the page was not done in time\n%s", output)
	}
}

package main

import (
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"strings"
)

// webAddr is on a link of the bench's own. run.sh lets sessions reach it by
// BERTH_EGRESS_ALLOW.
const (
	webAddr = "10.219.77.1"
	webLink = "berthbench0"
)

// web is the site that goto opens: a page with a style, a script and a
// picture, served from memory.
type web struct {
	url    string
	server *http.Server
}

// withWeb starts the site once.
func (b *bench) withWeb() error {
	if b.web != nil {
		return nil
	}
	_ = ip("link del " + webLink) // of a bench that was killed
	for _, args := range []string{"link add " + webLink + " type veth peer name " + webLink + "p",
		"addr add " + webAddr + "/32 dev " + webLink, "link set " + webLink + " up"} {
		if err := ip(args); err != nil {
			return err
		}
	}
	b.undo = append(b.undo, func() error { return ip("link del " + webLink) })
	l, err := net.Listen("tcp4", webAddr+":0")
	if err != nil {
		return err
	}
	w := &web{url: "http://" + l.Addr().String() + "/", server: &http.Server{Handler: http.HandlerFunc(page)}}
	b.web = w
	b.undo = append(b.undo, w.server.Close)
	go w.server.Serve(l)
	return nil
}

func page(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	switch r.URL.Path {
	case "/":
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, `<!doctype html><title>bench</title><link rel=stylesheet href=s.css><script src=s.js></script><img src=i.svg>`,
			strings.Repeat("<p>The quick brown fox jumps over the lazy dog.</p>", 200))
	case "/s.css":
		w.Header().Set("Content-Type", "text/css")
		fmt.Fprint(w, "p{margin:.2em;color:#123}")
	case "/s.js":
		w.Header().Set("Content-Type", "text/javascript")
		fmt.Fprint(w, "addEventListener('DOMContentLoaded',()=>document.body.dataset.n=document.querySelectorAll('p').length)")
	case "/i.svg":
		w.Header().Set("Content-Type", "image/svg+xml")
		fmt.Fprint(w, `<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40"><circle cx="20" cy="20" r="18"/></svg>`)
	default:
		http.NotFound(w, r)
	}
}

func ip(args string) error {
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", args, err, out)
	}
	return nil
}

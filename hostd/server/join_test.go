package server

import (
	"io"
	"net"
	"path/filepath"
	"testing"
)

// tunnelled gives both ends of a TCP connection joined to a unix one.
func tunnelled(t testing.TB) (gateway, agent net.Conn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a.sock")
	ul, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	tl, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tl.Close()
	defer ul.Close()
	go func() {
		in, err := tl.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("unix", path)
		if err != nil {
			in.Close()
			return
		}
		join(in, out)
	}()
	if gateway, err = net.Dial("tcp", tl.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if agent, err = ul.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { gateway.Close(); agent.Close() })
	return gateway, agent
}

func BenchmarkTunnelRoundTrip(b *testing.B) {
	gateway, agent := tunnelled(b)
	go func() {
		buf := make([]byte, 200)
		for {
			if _, err := io.ReadFull(agent, buf); err != nil {
				return
			}
			if _, err := agent.Write(buf); err != nil {
				return
			}
		}
	}()
	buf := make([]byte, 200)
	for b.Loop() {
		if _, err := gateway.Write(buf); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(gateway, buf); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkTunnelBulk(b *testing.B) {
	gateway, agent := tunnelled(b)
	buf := make([]byte, 256<<10)
	b.SetBytes(int64(len(buf)))
	go func() {
		for {
			if _, err := agent.Write(buf); err != nil {
				return
			}
		}
	}()
	in := make([]byte, 256<<10)
	for b.Loop() {
		if _, err := io.ReadFull(gateway, in); err != nil {
			b.Fatal(err)
		}
	}
}

func TestTunnelPassesHalfClose(t *testing.T) {
	gateway, agent := tunnelled(t)
	if _, err := gateway.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	if err := gateway.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(agent); err != nil || string(b) != "question" {
		t.Fatalf("%q %v", b, err)
	}
	if _, err := agent.Write([]byte("answer")); err != nil {
		t.Fatal(err)
	}
	agent.Close()
	if b, err := io.ReadAll(gateway); err != nil || string(b) != "answer" {
		t.Fatalf("%q %v", b, err)
	}
}

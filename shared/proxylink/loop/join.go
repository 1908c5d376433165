package loop

import (
	"context"
	"net"
)

// Join relays between a and b, which are closed as far as Go knows, and waits
// for the end; that of ctx resets both.
func Join(ctx context.Context, a, b *net.TCPConn, up, down Counter) error {
	x, err := Take(a)
	if err != nil {
		b.Close()
		return err
	}
	y, err := Take(b)
	if err != nil {
		closeFD(x)
		return err
	}
	ended := make(chan error, 1)
	r, err := StartNew(Ends{A: x, B: y, Up: up, Down: down}, func(err error) { ended <- err })
	if err != nil {
		closeFD(x)
		closeFD(y)
		return err
	}
	stop := context.AfterFunc(ctx, func() { r.Cancel(context.Cause(ctx)) })
	defer stop()
	return <-ended
}
